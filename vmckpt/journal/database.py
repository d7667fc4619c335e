"""A journal's database: transactions as functions, so that one that failed can be tried again.

What is SQLite's or PostgreSQL's alone is in `sqlite` and `postgresql`; all else is above them.
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
    """May be used from several threads."""

    shared: ClassVar[bool] = False
    """Whether several machines use it."""
    foreign: ClassVar[type[Exception]] = SQLAlchemyError
    """What the driver's own errors are, which may come as they are."""

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
        """A transaction that sees one state of the journal."""
        with self._explained():
            return self._read(work)

    def write(self, work: Callable[[Connection], T]) -> T:
        """A transaction that writes, all or nothing; it waits for others that do.

        `work` may be called again, if the first time has certainly left nothing.
        """
        if self._read_only:
            raise ReadOnly(f"{self} is open for looking only", hint="nothing was written")
        with self._explained():
            return self._write(work)

    @abstractmethod
    def _read(self, work: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    def _write(self, work: Callable[[Connection], T]) -> T: ...

    @abstractmethod
    def alone(self, connection: Connection) -> None:
        """Keep everybody else from making or migrating tables until this transaction ends."""

    @abstractmethod
    def insert_new(self, table: Table) -> Insert:
        """An insert that leaves a row alone that is there."""

    def now(self) -> ColumnElement[float]:
        """The time now, in seconds since 1970, by the one clock that all who write here share."""
        return literal(time.time(), Float(53))

    def explain(self, why: str) -> tuple[str, str | None]:
        """A complaint as it is to be shown, and what mends it."""
        return why, None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever the database complains about, in one line."""
        try:
            yield
        except Exception as exc:
            if not isinstance(exc, SQLAlchemyError | self.foreign):
                raise
            told = exc.orig if isinstance(exc, DBAPIError) else exc
            why, hint = self.explain(" ".join(str(told).split()))
            raise JournalError(f"{self}: {why}", hint=hint) from exc
