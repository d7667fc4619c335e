"""A journal's database: transactions are functions, so that a failed one can be retried.

Code that is specific to SQLite or PostgreSQL is in `sqlite` and `postgresql`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from sqlalchemy import ColumnElement, Connection, Float, Insert, Table, literal
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from vmckpt.errors import JournalError, ReadOnly

T = TypeVar("T")


class Database(ABC):
    """A database that holds a journal. It can be used from several threads."""

    shared: ClassVar[bool] = False
    """Whether controllers on several machines can use it."""
    foreign: ClassVar[type[Exception]] = SQLAlchemyError
    """The driver's own exceptions, which SQLAlchemy may pass through."""

    def __init__(self, name: str, *, read_only: bool) -> None:
        self._name = name
        self._read_only = read_only

    def __str__(self) -> str:
        return self._name

    @property
    def read_only(self) -> bool:
        return self._read_only

    @abstractmethod
    def close(self) -> None: ...

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that sees one state of the journal. Returns its result.

        Raises JournalError.
        """
        with self._explained():
            return self._read(work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that writes, and return its result.

        It waits for other writers. `work` may be called again if its first call certainly had no
        effect. Raises ReadOnly if the journal is open read-only, and JournalError.
        """
        if self._read_only:
            raise ReadOnly(f"{self} is open read-only", hint="nothing was written")
        with self._explained():
            return self._write(work)

    @abstractmethod
    def _read(self, work: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    def _write(self, work: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    def alone(self, connection: Connection) -> None:
        """Lock out other processes that create or migrate tables until this transaction ends."""

    @abstractmethod
    def insert_new(self, table: Table) -> Insert:
        """Return an insert that does nothing if the row exists."""

    def now(self) -> ColumnElement[float]:
        """Return the current time, in seconds since 1970, by the clock that all writers share."""
        return literal(time.time(), Float(53))

    def explain(self, why: str) -> tuple[str, str | None]:
        """Return an error message to show for the database's message `why`, and a hint."""
        return why, None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the database into JournalError, in one line."""
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, SQLAlchemyError | self.foreign):
                raise
            told = exc.orig if isinstance(exc, DBAPIError) else exc
            why, hint = self.explain(" ".join(str(told).split()))
            raise JournalError(f"{self}: {why}", hint=hint) from exc
