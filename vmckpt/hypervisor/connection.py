"""Connections to a host's libvirt: two for each host, each with its own thread.

The short connection serves queries and commands, each with a time limit. The long connection serves
calls that last as long as a migration, so queries and an abort never wait for a migration.

The threads are daemon threads: a libvirt call that never returns must not keep the process from
exiting, and an executor would join its threads at exit. This module also runs libvirt's event loop,
redirects libvirt's error output, and maps libvirt's errors to `vmckpt.errors`.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from shlex import quote
from typing import TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit
from xml.etree.ElementTree import ParseError

import libvirt
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from vmckpt.errors import HostUnreachable, HypervisorError, OutcomeUnknown, ReadOnly
from vmckpt.model.host import Host
from vmckpt.units import Seconds

T = TypeVar("T")


class ConnectionThread:
    """A thread that runs callables in the order in which they were passed to `run`.

    The first callable starts the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in the thread and return its result.

        Cancellation does not stop a call that the thread has started. Raises what `call` raises; a
        StopIteration becomes a ValueError.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            # The waiting task may be gone, and its loop closed; then the result is dropped.
            with contextlib.suppress(RuntimeError):
                if future.cancelled():
                    return
                try:
                    result = call()
                except BaseException as exc:  # noqa: BLE001 - raised in the waiting task
                    loop.call_soon_threadsafe(_fail, future, exc)
                else:
                    loop.call_soon_threadsafe(_finish, future, result)

        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)
        return await future

    def close(self) -> None:
        """Let the thread exit after the calls that are already queued."""
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()


def _finish(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: BaseException) -> None:
    if not future.done():
        # A future does not accept StopIteration, and the waiting task would wait forever.
        stopped = isinstance(error, StopIteration)
        future.set_exception(ValueError("an expected item is missing") if stopped else error)


log = logging.getLogger("vmckpt.libvirt")


@functools.cache
def start() -> None:
    """Run libvirt's event loop in its own thread, and redirect libvirt's error output to the log.

    Keep-alive works only while this loop runs, and only for connections opened after this call.
    """
    libvirt.registerErrorHandler(lambda _context, error: log.debug("%s", error[2]), None)
    libvirt.virEventRegisterDefaultImpl()
    threading.Thread(target=_turn_for_ever, name="libvirt events", daemon=True).start()


def _turn_for_ever() -> None:
    while True:
        libvirt.virEventRunDefaultImpl()


def without_questions(uri: str) -> str:
    """Add `no_tty` to a URI that uses ssh, and return the URI; other URIs are unchanged.

    With `no_tty`, ssh fails instead of asking for a password or about an unknown host key. A prompt
    would appear in the middle of vmckpt's output, and accepting an unknown key there would bypass
    the rule that host keys are verified.
    """
    try:
        parts = urlsplit(uri)
    except ValueError:
        return uri  # libvirt reports what is wrong with the URI
    if not parts.scheme.endswith("+ssh") or "no_tty" in parse_qs(parts.query):
        return uri
    query = f"{parts.query}&no_tty=1" if parts.query else "no_tty=1"
    return urlunsplit(parts._replace(query=query))


@contextmanager
def opened(uri: str, host: str) -> Iterator[libvirt.virConnect]:
    """Open a connection, and close it at the end of the block. Raises HostUnreachable.

    `host`: the host's name in the error.
    """
    start()
    try:
        connection = libvirt.open(without_questions(uri))
    except libvirt.libvirtError as exc:
        what = ConnectionBroken(exc, sent=False)
        raise map_broken(what, host=host, what="connecting", changes=False) from exc
    try:
        yield connection
    finally:
        with suppress(libvirt.libvirtError):
            connection.close()


def once(
    uri: str, host: str, what: str, call: Callable[[libvirt.virConnect], T], *, changes: bool
) -> T:
    """Make one call over a new connection and return its result.

    `what` describes the call in errors. Raises HostUnreachable or HypervisorError; OutcomeUnknown
    if the connection broke during the call and `changes` is true.
    """
    with opened(uri, host) as connection:
        try:
            return call(connection)
        except libvirt.libvirtError as exc:
            if connection.isAlive() == 1:
                raise map_refusal(exc, host=host, what=what) from exc
            failed = ConnectionBroken(exc, sent=True)
            raise map_broken(failed, host=host, what=what, changes=changes) from exc


NOT_HERE = (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID)
"""libvirt's error codes for a guest that is not known to the host, or that is not running there."""


class ConnectionBroken(Exception):
    """The connection failed, rather than the call."""

    def __init__(self, error: libvirt.libvirtError, *, sent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.sent = sent
        """Whether the call was sent; if not, it cannot have changed anything."""


def map_refusal(error: libvirt.libvirtError, *, host: str, what: str) -> HypervisorError:
    """Return the HypervisorError for a call that libvirt refused. `what` describes the call."""
    return HypervisorError(
        f"{host}: {what}: {_text(error)}", host=host, code=error.get_error_code()
    )


def map_broken(broken: ConnectionBroken, *, host: str, what: str, changes: bool) -> HypervisorError:
    """Return the error for a call whose connection broke.

    Returns OutcomeUnknown if the call was sent and may have changed something (`changes`),
    otherwise HostUnreachable.
    """
    text, code = _text(broken.error), broken.error.get_error_code()
    if changes and broken.sent:
        return OutcomeUnknown(
            f"{host}: connection lost while {what}; the call may have taken effect: {text}",
            host=host,
            code=code,
        )
    return HostUnreachable(
        f"{host}: libvirt cannot be reached: {text}",
        host=host,
        code=code,
        hint=f"run vmckpt doctor {quote(host)}",
    )


def _text(error: libvirt.libvirtError) -> str:
    return " ".join(str(error).split())


CALL_LIMIT = Seconds(10.0)
# A host that is off or unreachable never answers; an ssh or TLS login takes a second or two.
OPEN_LIMIT = Seconds(6.0)
_KEEPALIVE_SECONDS, _KEEPALIVE_COUNT = 5, 3
# Exceptions raised by parsing an invalid answer.
NONSENSE = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ParseError, RecursionError,
)  # fmt: skip


class _Connection:
    """A connection and its thread. The first call opens it; later calls reopen it if it broke."""

    def __init__(self, host: Host, name: str) -> None:
        self._host = host
        self._thread = ConnectionThread(f"{host.name} {name}")
        self._connection: libvirt.virConnect | None = None

    async def run(self, call: Callable[[libvirt.virConnect], T]) -> T:
        return await self._thread.run(lambda: self._do(call))

    async def open(self) -> None:
        await self._thread.run(lambda: self._do(lambda _connection: None))

    def _do(self, call: Callable[[libvirt.virConnect], T]) -> T:
        """Make a call and return its result. Runs in the thread.

        Raises ConnectionBroken if the connection failed, libvirtError if libvirt refused the call.
        """
        try:
            connection = self._open()
        except libvirt.libvirtError as exc:
            raise ConnectionBroken(exc, sent=False) from exc
        try:
            return call(connection)
        except libvirt.libvirtError as exc:
            if connection.isAlive() != 1:
                raise ConnectionBroken(exc, sent=True) from exc
            raise

    def _open(self) -> libvirt.virConnect:
        """Return a connection that is alive. Runs in the thread. Raises libvirtError."""
        if self._connection is not None and self._connection.isAlive() != 1:
            self._drop()
        if self._connection is None:
            start()
            opened = libvirt.openReadOnly if self._host.read_only else libvirt.open
            self._connection = opened(without_questions(self._host.uri))
            with suppress(libvirt.libvirtError):  # local URIs have no keep-alive
                self._connection.setKeepAlive(_KEEPALIVE_SECONDS, _KEEPALIVE_COUNT)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(libvirt.libvirtError):
                self._connection.close()
            self._connection = None

    async def close(self, limit: Seconds) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._thread.run(self._drop)
        self._thread.close()


class Hypervisor:
    """A host's libvirt. Use as `async with Hypervisor(host) as hypervisor`."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.check_lease: Callable[[], None] | None = None
        """Called right before a call that changes something, in the connection's thread. Raises an
        error to forbid the call. None: every call is allowed."""
        self._short = _Connection(host, "short")
        self._long = _Connection(host, "long")

    async def __aenter__(self) -> "Hypervisor":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._short.close(Seconds(2.0))
        await self._long.close(Seconds(2.0))

    async def query(
        self, what: str, call: Callable[[libvirt.virConnect], T], *, limit: Seconds = CALL_LIMIT
    ) -> T:
        """Make a call that changes nothing, and return its result.

        The call is retried once on a new connection if the connection broke. `what` describes the
        call in errors. Raises HostUnreachable or HypervisorError.
        """
        with self._translated(what, changes=False):
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(ConnectionBroken),
                stop=stop_after_attempt(2),
                wait=wait_fixed(0.2),
                reraise=True,
            ):
                with attempt:
                    return await self._in_time(what, call, limit=limit, changes=False)
        raise AssertionError("tenacity always returns a result or raises an error")

    async def execute(
        self, what: str, call: Callable[[libvirt.virConnect], T], *, limit: Seconds = CALL_LIMIT
    ) -> T:
        """Make a call that changes something, once, and return its result.

        Raises HostUnreachable, HypervisorError, OutcomeUnknown, ReadOnly, and any error from
        `check_lease`.
        """
        self._may_act(what)
        with self._translated(what, changes=True):
            return await self._in_time(what, self._guarded(call), limit=limit, changes=True)

    async def execute_long(self, what: str, call: Callable[[libvirt.virConnect], T]) -> T:
        """Make a call that changes something, without a time limit, and return its result.

        The call uses the long connection. Only connecting has a time limit, since nothing is
        changed before the call. Raises the same errors as `execute`.
        """
        self._may_act(what)
        with self._translated(what, changes=True):
            try:
                async with asyncio.timeout(OPEN_LIMIT):
                    await self._long.open()
            except TimeoutError as exc:
                self._long = _Connection(self.host, "long")
                raise self._silent("libvirt connection", OPEN_LIMIT) from exc
            return await self._long.run(self._guarded(call))

    def _guarded(
        self, call: Callable[[libvirt.virConnect], T]
    ) -> Callable[[libvirt.virConnect], T]:
        def guarded(connection: libvirt.virConnect) -> T:
            if self.check_lease is not None:
                self.check_lease()
            return call(connection)

        return guarded

    def _may_act(self, what: str) -> None:
        if self.host.read_only:
            raise ReadOnly(f"{self.host.name}: {what}: refused in read-only mode")

    @contextmanager
    def _translated(self, what: str, *, changes: bool) -> Iterator[None]:
        """Map libvirt's errors, and errors from parsing its answers, to `vmckpt.errors`.

        `what` describes the call in errors; `changes`: whether the call changes something.
        """
        try:
            yield
        except libvirt.libvirtError as exc:
            raise map_refusal(exc, host=self.host.name, what=what) from exc
        except ConnectionBroken as exc:
            raise map_broken(exc, host=self.host.name, what=what, changes=changes) from exc
        except NONSENSE as exc:
            raise self._nonsense(what, exc, changes=changes) from exc

    def _nonsense(self, what: str, exc: Exception, *, changes: bool) -> HypervisorError:
        name = self.host.name
        reason = f"{type(exc).__name__}: {exc}" if isinstance(exc, LookupError) else str(exc)
        text = f"{name}: {what}: invalid answer: {reason[:200]}"
        if changes:
            return OutcomeUnknown(f"{text}; the call may have taken effect", host=name)
        return HypervisorError(text, host=name, hint=f"run vmckpt doctor {quote(name)}")

    async def _in_time(
        self, what: str, call: Callable[[libvirt.virConnect], T], *, limit: Seconds, changes: bool
    ) -> T:
        """Connect, then make a call on the short connection, each within its time limit.

        Returns the result of the call. `what`, `changes`: as in `_translated`.
        """
        line, name = self._short, self.host.name
        try:
            async with asyncio.timeout(OPEN_LIMIT):
                await line.open()
        except TimeoutError as exc:
            raise self._no_answer("libvirt connection", OPEN_LIMIT) from exc
        try:
            async with asyncio.timeout(limit):
                return await line.run(call)
        except TimeoutError as exc:
            error = self._no_answer(what, limit)
            if changes:
                text = f"{error.message}; the call may have taken effect"
                raise OutcomeUnknown(text, host=name) from exc
            raise error from exc

    def _no_answer(self, what: str, limit: Seconds) -> HostUnreachable:
        """Abandon the thread, which is stuck in its call, and use a new connection from now on.

        Returns the error to raise. `what` describes the call; `limit` is the time that has passed.
        """
        self._short = _Connection(self.host, "short")
        return self._silent(what, limit)

    def _silent(self, what: str, limit: Seconds) -> HostUnreachable:
        name = self.host.name
        return HostUnreachable(
            f"{name}: {what}: no answer within {limit:g} s",
            host=name,
            hint=f"run vmckpt doctor {quote(name)}",
        )
