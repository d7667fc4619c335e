"""Opening the journal's database. All that is SQLite's alone is here."""

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from vmckpt.errors import JournalError
from vmckpt.units import Seconds

_WRITES = "vmckpt_writes"


class Database:
    """One SQLite file; may be used from several threads."""

    def __init__(self, path: Path, *, busy: Seconds) -> None:
        self.path = path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_file(path)
        except OSError as exc:
            raise JournalError(
                f"journal {path}: {exc.strerror}", mend="name another folder in VMCKPT_STATE"
            ) from exc
        self._readers = _engine(path, busy)
        self._writers = self._readers.execution_options(**{_WRITES: True})

    def __str__(self) -> str:
        return f"journal {self.path}"

    def close(self) -> None:
        self._readers.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the journal."""
        with self._explained(), self._readers.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes; it waits for others that do."""
        with self._explained(), self._writers.begin() as connection:
            yield connection

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever the database complains about, in one line."""
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as exc:
            told = exc.orig if isinstance(exc, DBAPIError) else exc
            why = " ".join(str(told).split())
            raise JournalError(f"{self}: {why}", mend=_mend(why)) from exc


def _make_file(path: Path) -> None:
    """Make the file if there is none. SQLite's other files take their mode from it.

    One that is there is not opened: closing it again would drop all locks that this process holds
    on it through SQLite, and whoever closes the journal next would take himself for the last one
    and remove the log that we write to.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file") from None


def _mend(why: str) -> str | None:
    if "locked" in why:
        return "another program holds it; try again"
    if "not a database" in why or "malformed" in why:
        return "move the file away; a new one is made"
    return None


def _engine(path: Path, busy: Seconds) -> Engine:
    made = create_engine(URL.create("sqlite", database=str(path)), connect_args={"timeout": busy})
    event.listen(made, "connect", lambda raw, _record: _prepare(raw, busy))
    event.listen(made, "begin", _begin)
    return made


def _prepare(raw: sqlite3.Connection, busy: Seconds) -> None:
    """Set up a new connection."""
    raw.isolation_level = None  # `_begin` says where a transaction begins, not the driver
    cursor = raw.cursor()
    _to_wal(cursor, Seconds(time.monotonic() + busy))
    # In WAL mode NORMAL can lose the last transactions to a power cut, but breaks nothing.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _to_wal(cursor: sqlite3.Cursor, until: Seconds) -> None:
    """Switch to WAL. SQLite does not wait when two processes do so to a new file at once."""
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            return


def _begin(connection: Connection) -> None:
    """Begin a transaction; one that writes takes its lock now, so that it never fails later on."""
    options: dict[str, Any] = dict(connection.get_execution_options())
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")
