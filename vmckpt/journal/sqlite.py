"""A journal in an SQLite file, for the controllers of one machine."""

import errno
import os
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, Insert, Table, create_engine, event
from sqlalchemy.dialects.sqlite import insert

from vmckpt.errors import JournalError
from vmckpt.journal.database import Database
from vmckpt.units import Seconds

T = TypeVar("T")

_WRITES = "vmckpt_writes"
_LOSES = (
    'first recover the journal\'s content (see "A damaged journal" in docs/recovery.md); moving the'
    " file away also abandons the leases and protections in the journal"
)


class SqliteDatabase(Database):
    """An SQLite file. A writing transaction locks the complete file, so rows need no locks."""

    foreign: ClassVar[type[Exception]] = sqlite3.Error

    def __init__(self, path: Path, *, busy: Seconds, read_only: bool) -> None:
        super().__init__(f"journal {path}", read_only=read_only)
        try:
            if read_only:
                _look(path)
            else:
                # QEMU must be able to traverse the directory if the agent's directory is in it. The
                # files of the journal are private.
                path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
                _make_file(path)
        except OSError as exc:
            hint = "name another file with --journal, or set VMCKPT_STATE to another directory"
            if read_only and isinstance(exc, FileNotFoundError):
                raise JournalError(f"{self} does not exist", hint=hint) from exc
            raise JournalError(f"{self}: {exc.strerror}", hint=hint) from exc
        self._readers = _engine(path, busy, read_only=read_only)
        self._writers = self._readers.execution_options(**{_WRITES: True})

    def close(self) -> None:
        self._readers.dispose()

    def _read(self, work: Callable[[Connection], T]) -> T:
        with self._readers.begin() as connection:
            return work(connection)

    def _write(self, work: Callable[[Connection], T]) -> T:
        with self._writers.begin() as connection:
            return work(connection)

    def alone(self, connection: Connection) -> None:
        """Do nothing, because a writing transaction locks the complete file."""

    def insert_new(self, table: Table) -> Insert:
        return insert(table).on_conflict_do_nothing()

    def explain(self, why: str) -> tuple[str, str | None]:
        if "locked" in why:
            return why, "another process has locked the journal; try again"
        if "not a database" in why or "malformed" in why:
            return why, _LOSES
        return why, None


def _look(path: Path) -> None:
    """Raise OSError unless the path is a regular file that can be read.

    Does not open the file. For the reason see `_make_file`.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _make_file(path: Path) -> None:
    """Create the file if it does not exist. SQLite's other files inherit the file's mode.

    An existing file must not be opened here. Closing the file would drop all locks that this
    process holds on it through SQLite. The next connection to close would then consider itself the
    last connection, and would delete the write-ahead log although it is in use.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "not a regular file") from None


def _engine(path: Path, busy: Seconds, *, read_only: bool) -> Engine:
    place = URL.create("sqlite", database=str(path))
    if read_only:
        query = {"mode": "ro", "uri": "true"}
        place = URL.create("sqlite", database=f"file:{quote(str(path.absolute()))}", query=query)
    made = create_engine(place, connect_args={"timeout": busy})
    event.listen(made, "connect", lambda raw, _record: _prepare(raw, busy, read_only=read_only))
    event.listen(made, "begin", _begin)
    return made


def _prepare(raw: sqlite3.Connection, busy: Seconds, *, read_only: bool) -> None:
    """Set up a new connection. `busy`: maximum wait for other writers."""
    raw.isolation_level = None  # transactions are begun by `_begin`, not by the driver
    if read_only:
        return
    cursor = raw.cursor()
    _to_wal(cursor, Seconds(time.monotonic() + busy))
    # Recorded intents must survive a power failure. With NORMAL, the last transactions may be lost.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _to_wal(cursor: sqlite3.Cursor, until: Seconds) -> None:
    """Switch to WAL mode.

    Retries, because SQLite does not wait if two processes switch to WAL mode at the same time.
    `until`: when to give up, by time.monotonic().
    """
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
    """Begin a transaction. A writing transaction locks the file now: locking later could fail."""
    options: dict[str, Any] = dict(connection.get_execution_options())
    connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")
