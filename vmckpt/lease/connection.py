"""A line to PostgreSQL whose calls end within their limit, whatever happens to server or network.

The connection belongs to a thread of its own: libpq may hang where no limit reaches, as in looking
a name up. A thread that does not answer in time is left to itself, and another takes its place.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeAlias

import psycopg
from psycopg.conninfo import conninfo_to_dict

from vmckpt.errors import BadInput, VmckptError
from vmckpt.units import Seconds, show_seconds

# Threads that hang; with as many nothing more is tried until one has come back.
_HANGING = 3
_Call: TypeAlias = "tuple[Future[Any], str, Sequence[object]]"


class LeaseUnreachable(VmckptError):
    """The witness gave no answer; what was asked may have happened, or may yet happen."""


class LeaseRefused(VmckptError):
    """The witness said no; nothing was changed."""


def settings(dsn: str, password: str | None = None) -> dict[str, Any]:
    """What psycopg is told for a URL or a list of settings. Raises BadInput if it is neither."""
    try:
        told = dict(conninfo_to_dict(dsn))
    except psycopg.Error:  # which repeats it, with its password
        raise BadInput(
            "the witness's address cannot be read",
            hint="write postgresql://user@host:port/database",
        ) from None
    if password is not None:
        told["password"] = password
    return told


class _Worker(threading.Thread):
    """Has the connection, and makes a new one when it broke."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(name="witness", daemon=True)
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._told = told
        self._connection: psycopg.Connection[Any] | None = None
        self._warnings: list[str] = []
        """PostgreSQL's, about the call under way."""
        self._lock = threading.Lock()
        self._copy: socket.socket | None = None
        """The connection's socket once more: the number of libpq's own may be another's by now."""

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            future, statement, arguments = call
            try:
                future.set_result(self._ask(statement, arguments))
            except Exception as exc:  # noqa: BLE001 - the caller gets it, whatever it is
                future.set_exception(exc)
        self._close()

    def _ask(self, statement: str, arguments: Sequence[object]) -> Any:
        """One value. A connection that was lost since the last call is made anew, once."""
        had = self._connection is not None
        try:
            return self._execute(statement, arguments)
        except psycopg.OperationalError:
            if self._connection is not None and not self._connection.closed:
                raise  # the server has answered: that it will not
            self._close()
            if not had:
                raise
            return self._execute(statement, arguments)

    def _execute(self, statement: str, arguments: Sequence[object]) -> Any:
        if self._connection is None:
            self._connection = psycopg.connect(
                **self._told, autocommit=True, prepare_threshold=None
            )
            self._connection.add_notice_handler(self._notice)
            with self._lock:
                self._copy = socket.socket(fileno=os.dup(self._connection.fileno()))
        self._warnings.clear()
        row = self._connection.execute(statement.encode(), arguments).fetchone()
        if self._warnings:
            raise psycopg.Warning(self._warnings[0])
        return row[0] if row else None

    def _notice(self, told: psycopg.errors.Diagnostic) -> None:
        """A wait for a synchronous replica that was cancelled ends in a warning, and no error."""
        if told.severity_nonlocalized == "WARNING":
            self._warnings.append(f"{told.message_primary} {told.message_detail or ''}".strip())

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        with self._lock:
            if self._copy is not None:
                self._copy.close()
            self._copy = None
        if connection is not None:
            connection.close()

    def cut(self) -> None:
        """Break its connection, so that it comes to an end sooner."""
        self.calls.put(None)
        with self._lock, suppress(OSError):
            if self._copy is not None:
                self._copy.shutdown(socket.SHUT_RDWR)


class LeaseConnection:
    """Calls of one value each. For several threads; one calls at a time."""

    def __init__(self, dsn: str, *, password: str | None, limit: Seconds) -> None:
        """`limit` holds for a whole call, with connecting. Raises BadInput."""
        self._told = {**settings(dsn, password), **_limits(limit)}
        options = self._told.get("options")
        self._told["options"] = f"{options or ''} {_session(limit)}".strip()
        self._limit = limit
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._hanging: list[_Worker] = []

    def ask(self, statement: str, arguments: Sequence[object] = ()) -> Any:
        """Raises LeaseUnreachable, also where it is not known what happened; LeaseRefused."""
        end = time.monotonic() + self._limit
        if not self._lock.acquire(timeout=self._limit):
            raise self._silent()
        try:
            return self._asked(statement, arguments, end)
        finally:
            self._lock.release()

    def _asked(self, statement: str, arguments: Sequence[object], end: float) -> Any:
        self._hanging = [worker for worker in self._hanging if worker.is_alive()]
        if len(self._hanging) >= _HANGING:
            raise self._silent()
        if self._worker is None:
            self._worker = _Worker(self._told)
            self._worker.start()
        future: Future[Any] = Future()
        self._worker.calls.put((future, statement, arguments))
        try:
            return future.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            self._hanging.append(self._worker)
            self._worker.cut()
            self._worker = None
            raise self._silent() from None
        except psycopg.errors.InsufficientPrivilege as exc:
            raise LeaseRefused(f"the witness refuses it: {self._one_line(exc)}") from exc
        except (psycopg.Error, psycopg.Warning) as exc:
            raise LeaseUnreachable(f"the witness has not done it: {self._one_line(exc)}") from exc

    def _silent(self) -> LeaseUnreachable:
        return LeaseUnreachable(
            f"the witness gave no answer in {show_seconds(self._limit)}",
            hint="see that PostgreSQL runs and can be reached from here",
        )

    def _one_line(self, error: Exception) -> str:
        """PostgreSQL's words without line ends and password."""
        text = " ".join(str(error).split()) or type(error).__name__
        password = self._told.get("password")
        return text.replace(str(password), "***") if password else text

    def close(self) -> None:
        """Hang up, without waiting for anybody."""
        with self._lock:
            if self._worker is not None:
                self._worker.calls.put(None)
                self._worker = None


def _limits(limit: Seconds) -> dict[str, Any]:
    """For the thread that is left to itself: it ends too, some seconds later."""
    return {
        "application_name": "vmckpt lease",
        "connect_timeout": 2,  # libpq knows no less
        "keepalives_idle": 1,
        "keepalives_interval": 1,
        "keepalives_count": 2,
        "tcp_user_timeout": max(int(limit * 1000), 100),
    }


def _session(limit: Seconds) -> str:
    """The server, too, gives up what nobody waits for any more, and frees what it has locked."""
    most = max(int(limit * 1000), 1)
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    limits = " ".join(f"-c {name}={most}" for name in names)
    # A row that waited for another's change is looked at again.
    return rf"{limits} -c default_transaction_isolation=read\ committed"
