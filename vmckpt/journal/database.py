"""A journal's database. Transactions are functions, so that a failed transaction can be retried.

The code for SQLite and PostgreSQL is in `sqlite` and `postgresql`.
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
    """The database of a journal. Can be used from several threads."""

    shared: ClassVar[bool] = False
    """Whether controllers on several machines can share the database."""
    foreign: ClassVar[type[Exception]] = SQLAlchemyError
    """The base class of the driver's exceptions that SQLAlchemy may pass through."""

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
        """Run `work` in a transaction that sees one consistent state of the journal.

        Returns the result of `work`. Raises JournalError.
        """
        with self._explained():
            return self._read(work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction that writes, after waiting for other writers.

        If a transaction failed and certainly had no effect, `work` may be called again. Returns the
        result of `work`. Raises ReadOnly if the journal is open read-only, and JournalError.
        """
        if self._read_only:
            raise ReadOnly(
                f"{self} is open read-only; nothing was written",
                hint="omit --read-only, and unset VMCKPT_READ_ONLY",
            )
        with self._explained():
            return self._write(work)

    @abstractmethod
    def _read(self, work: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    def _write(self, work: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    def alone(self, connection: Connection) -> None:
        """Prevent other processes from creating or migrating tables until this transaction ends."""

    @abstractmethod
    def insert_new(self, table: Table) -> Insert:
        """Return an INSERT statement that does nothing if the row already exists."""

    def now(self) -> ColumnElement[float]:
        """Return an expression for the current time, by the clock that all writers share.

        The time is in seconds since 1970.
        """
        return literal(time.time(), Float(53))

    def explain(self, why: str) -> tuple[str, str | None]:
        """Return the message to show for the database error `why`, and a hint or None."""
        return why, None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert database errors to JournalError with a one-line message."""
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, SQLAlchemyError | self.foreign):
                raise
            told = exc.orig if isinstance(exc, DBAPIError) else exc
            why, hint = self.explain(" ".join(str(told).split()))
            raise JournalError(f"{self}: {why}", hint=hint) from exc
