"""A journal in a PostgreSQL database, for controllers on several machines.

SQLite locks the complete file; here, transactions lock rows. A transaction locks an operation's row
to write to the operation, and a lease's row to check the lease's token. All controllers use the
server's clock.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Insert,
    Table,
    cast,
    create_engine,
    extract,
    func,
    make_url,
    text,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import ArgumentError, DBAPIError

from vmckpt.errors import JournalError
from vmckpt.journal.database import Database
from vmckpt.units import Seconds

T = TypeVar("T")

_PAUSE = 0.1
_FORM = "use postgresql://user@host:port/database or postgresql:///?service=name"
# Query parameters and environment variables from which libpq takes the database if the URL does not
# name a database.
_ELSEWHERE = ("service", "dbname")
_ENVIRONMENT = ("PGSERVICE", "PGDATABASE")
# Key of the advisory lock that is held while tables are created or migrated.
_SCHEMA_LOCK = 0x766D636B7074
# SQLSTATEs of a serialization failure and a deadlock, after which a retry may succeed.
_AGAIN = ("40001", "40P01")

# Recorded intents must survive a power failure, whatever the server's default is.
_DURABLE = "synchronous_commit=on"
# If a controller is stopped during a transaction, its rows must not stay locked.
_STOPPED = "idle_in_transaction_session_timeout=10s"
# These settings detect a vanished server within ten seconds instead of a quarter of an hour.
_CONNECTION = {
    "connect_timeout": "5",
    "application_name": "vmckpt",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


@dataclass(slots=True)
class _Course:
    """Progress of a transaction."""

    connected: bool = False
    committing: bool = False


class PostgresDatabase(Database):
    """A database on a PostgreSQL server.

    A failed transaction is retried for a while, if it certainly was not committed.
    """

    shared: ClassVar[bool] = True
    # The driver serializes JSON itself, and raises TypeError for types that JSON does not support.
    foreign: ClassVar[type[Exception]] = TypeError

    def __init__(self, place: str, *, busy: Seconds, read_only: bool) -> None:
        url = _parsed(place)
        super().__init__(f"journal {_shown(url)}", read_only=read_only)
        secrets = (url.password, url.query.get("password"), url.query.get("sslpassword"))
        self._secrets = [str(one) for one in secrets if one]
        self._patience = busy
        self._met = False
        engine = _engine(url, busy, read_only=read_only)
        self._writers = engine.execution_options(isolation_level="READ COMMITTED")
        self._readers = engine.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    def close(self) -> None:
        self._writers.dispose()

    def _read(self, work: Callable[[Connection], T]) -> T:
        return self._patient(self._readers, work, writes=False)

    def _write(self, work: Callable[[Connection], T]) -> T:
        return self._patient(self._writers, work, writes=True)

    def _patient(self, engine: Engine, work: Callable[[Connection], T], *, writes: bool) -> T:
        """Run a transaction and return the result of `work`.

        The transaction is retried if the connection broke, or after a conflict with another
        transaction. `writes`: it changes something, so it is not retried once its outcome is
        unknown.
        """
        until, tried = time.monotonic() + self._patience, 0
        while True:
            course, tried = _Course(), tried + 1
            try:
                return self._once(engine, work, course)
            except DBAPIError as exc:
                if writes and course.committing and exc.connection_invalidated:
                    raise JournalError(
                        f"{self}: connection lost during a commit;"
                        " the last record may or may not have been saved",
                        hint="run vmckpt jobs to see what was recorded",
                    ) from exc
                late = tried > 1 and time.monotonic() > until
                if late or not self._passing(exc, course):
                    raise
            time.sleep(_PAUSE)

    def _once(self, engine: Engine, work: Callable[[Connection], T], course: _Course) -> T:
        with engine.connect() as connection:
            self._met = course.connected = True
            with connection.begin():
                made = work(connection)
                course.committing = True
            return made

    def _passing(self, exc: DBAPIError, course: _Course) -> bool:
        """Return whether a retry may succeed. Returns False if the server was never reached."""
        if not course.connected:
            return self._met
        return exc.connection_invalidated or getattr(exc.orig, "sqlstate", None) in _AGAIN

    def alone(self, connection: Connection) -> None:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _SCHEMA_LOCK})

    def insert_new(self, table: Table) -> Insert:
        return insert(table).on_conflict_do_nothing()

    def now(self) -> ColumnElement[float]:
        return cast(extract("epoch", func.clock_timestamp()), Float(53))

    def explain(self, why: str) -> tuple[str, str | None]:
        for secret in self._secrets:
            why = why.replace(secret, "***")
        if "lock timeout" in why:
            return why, "another process has locked the journal; try again"
        if "read-only" in why:
            return why, "set VMCKPT_JOURNAL to the server that accepts writes"
        if not self._met or "connect" in why:
            return why, "check that PostgreSQL is running on the server and accepts this user"
        return why, None


def _parsed(place: str) -> URL:
    """Parse a URL. Raises JournalError, without the URL, because it may contain a password."""
    try:
        # If a password contains an unescaped @ or /, a part of the password would be parsed as
        # another part of the URL, and would be shown.
        if place.count("@") > 1 or "@" in place.partition("://")[2].partition("/")[2]:
            raise ValueError
        url = make_url(place)
    except (ArgumentError, ValueError):
        raise JournalError(
            "the journal's URL is invalid", hint=f"{_FORM}, with @ in a password written as %40"
        ) from None
    named = any(url.query.get(one) for one in _ELSEWHERE)
    if not (url.database or named or any(os.environ.get(one) for one in _ENVIRONMENT)):
        raise JournalError(f"the journal's URL {_shown(url)} names no database", hint=_FORM)
    return url


def _shown(url: URL) -> str:
    """Format a URL for messages, without the password and the options."""
    user = f"{url.username}@" if url.username else ""
    port = url.port or url.query.get("port")
    host = f"{url.host or url.query.get('host', '')}{f':{port}' if port else ''}"
    service = url.query.get("service") or ("" if url.database else os.environ.get("PGSERVICE", ""))
    where = f"postgresql://{user}{host}/{url.database or url.query.get('dbname', '')}"
    return f"{where}?service={service}" if service else where


def _engine(url: URL, busy: Seconds, *, read_only: bool) -> Engine:
    first = [_STOPPED, f"lock_timeout={max(1, round(busy * 1000))}ms"]
    last = [_DURABLE, *(["default_transaction_read_only=on"] if read_only else [])]
    theirs = str(url.query.get("options", ""))
    query: dict[str, Any] = {**_CONNECTION, **url.query}
    query["options"] = " ".join((_options(first), theirs, _options(last)))
    meant = url.set(drivername="postgresql+psycopg", query=query)
    # No pre-ping is needed: `_patient` retries if a pooled connection is broken.
    return create_engine(meant, hide_parameters=True)


def _options(settings: Sequence[str]) -> str:
    return " ".join(f"-c {one}" for one in settings)
