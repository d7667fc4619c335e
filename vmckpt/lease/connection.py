"""A connection to PostgreSQL whose calls return within a time limit, whatever happens to the server
or the network.

A separate thread holds the connection, since libpq may block without a time limit, for example in a
name lookup. A thread that does not answer in time is abandoned, and a new thread replaces it.
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

# While this many abandoned threads exist, every call fails at once.
_HANGING = 3
_Call: TypeAlias = "tuple[Future[Any], str, Sequence[object]]"


class LeaseUnreachable(VmckptError):
    """The lease store did not answer or failed. It may have executed the request, or may do so."""


class LeaseRefused(VmckptError):
    """The lease store refused the request; nothing was changed."""


def settings(dsn: str, password: str | None = None) -> dict[str, Any]:
    """Return psycopg's settings for `dsn`, a URL or a list of settings.

    Raises BadInput if it is neither.
    """
    try:
        told = dict(conninfo_to_dict(dsn))
    except psycopg.Error:  # psycopg's message repeats the address, with the password
        raise BadInput(
            "the address of the lease store is invalid",
            hint="use an address like postgresql://user@host:port/database",
        ) from None
    if password is not None:
        told["password"] = password
    return told


class _Worker(threading.Thread):
    """The thread that holds the connection and opens a new one when it is lost."""

    def __init__(self, told: dict[str, Any]) -> None:
        super().__init__(name="witness", daemon=True)
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._told = told
        self._connection: psycopg.Connection[Any] | None = None
        self._warnings: list[str] = []
        """PostgreSQL's warnings about the current call."""
        self._lock = threading.Lock()
        self._copy: socket.socket | None = None
        """A duplicate of the connection's socket: libpq may have closed its own descriptor, and
        the descriptor's number may have been reused for another file."""

    def run(self) -> None:
        while (call := self.calls.get()) is not None:
            future, statement, arguments = call
            try:
                future.set_result(self._ask(statement, arguments))
            except Exception as exc:  # noqa: BLE001 - the caller gets any error
                future.set_exception(exc)
        self._close()

    def _ask(self, statement: str, arguments: Sequence[object]) -> Any:
        """Return the value of one statement. A connection that was lost since the last call is
        reopened once."""
        had = self._connection is not None
        try:
            return self._execute(statement, arguments)
        except psycopg.OperationalError:
            if self._connection is not None and not self._connection.closed:
                raise  # the server has answered that it refuses the statement
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
        """Keep a warning: if the wait for a replica was cancelled, PostgreSQL sends only a
        warning."""
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
        """Shut down the connection so that the thread ends sooner."""
        self.calls.put(None)
        with self._lock, suppress(OSError):
            if self._copy is not None:
                self._copy.shutdown(socket.SHUT_RDWR)


class LeaseConnection:
    """A connection for calls that return one value. Threads may share it, one call at a time."""

    def __init__(self, dsn: str, *, password: str | None, limit: Seconds) -> None:
        """`limit`: time limit of a call, including the time to connect. Raises BadInput if `dsn` is
        invalid."""
        self._told = {**settings(dsn, password), **_limits(limit)}
        options = self._told.get("options")
        self._told["options"] = f"{options or ''} {_session(limit)}".strip()
        self._limit = limit
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._hanging: list[_Worker] = []

    def ask(self, statement: str, arguments: Sequence[object] = ()) -> Any:
        """Run `statement` and return its value.

        Raises LeaseUnreachable, also if the outcome is unknown, and LeaseRefused.
        """
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
            raise LeaseRefused(
                f"the lease store refused the request: {self._one_line(exc)}"
            ) from exc
        except (psycopg.Error, psycopg.Warning) as exc:
            raise LeaseUnreachable(f"the lease store failed: {self._one_line(exc)}") from exc

    def _silent(self) -> LeaseUnreachable:
        return LeaseUnreachable(
            f"the lease store did not answer within {show_seconds(self._limit)}",
            hint="check that PostgreSQL is running and reachable from both hosts of the guest",
        )

    def _one_line(self, error: Exception) -> str:
        """Return PostgreSQL's message on one line, without the password."""
        text = " ".join(str(error).split()) or type(error).__name__
        password = self._told.get("password")
        return text.replace(str(password), "***") if password else text

    def close(self) -> None:
        """Close the connection without waiting for the thread."""
        with self._lock:
            if self._worker is not None:
                self._worker.calls.put(None)
                self._worker = None


def _limits(limit: Seconds) -> dict[str, Any]:
    """Return connection settings that also make an abandoned thread end within seconds."""
    return {
        "application_name": "vmckpt lease",
        "connect_timeout": 2,  # libpq's minimum
        "keepalives_idle": 1,
        "keepalives_interval": 1,
        "keepalives_count": 2,
        "tcp_user_timeout": max(int(limit * 1000), 100),
    }


def _session(limit: Seconds) -> str:
    """Return session options: after the limit, the server aborts a call and releases its locks."""
    most = max(int(limit * 1000), 1)
    names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    limits = " ".join(f"-c {name}={most}" for name in names)
    # With READ COMMITTED, PostgreSQL rereads a row after waiting for another transaction's change.
    return rf"{limits} -c default_transaction_isolation=read\ committed"
