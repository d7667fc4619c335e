"""Run a process on a host, and exchange lines of JSON with it.

The process is started over ssh if the inventory has an ssh address, otherwise on this machine.
"""

import asyncio
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, Protocol

import paramiko

from vmckpt.errors import RemoteError
from vmckpt.model.host import Host
from vmckpt.remote.ssh import Remote, last_line
from vmckpt.units import Seconds

_LONGEST = 16 << 20
_KEPT_ERRORS = 8 << 10
_ENDS_WITHIN = Seconds(10.0)
_GIVES_UP_WITHIN = Seconds(150.0)
"""How long a process on this machine may take to undo its changes before it is killed."""


class _Streams(Protocol):
    """The input and output of a process. All calls block."""

    def write(self, data: bytes) -> None: ...

    def lines(self) -> IO[bytes]: ...

    def errors(self) -> IO[bytes]: ...

    def no_more(self) -> None:
        """Close the input of the process."""

    def kill(self) -> None: ...


class AgentProcess:
    """A process on a host. Use as an async context manager.

    Leaving the block closes the input of the process. The process is expected to exit then;
    otherwise, it is killed.
    """

    def __init__(self, host: Host, args: Sequence[str], remote: Remote | None = None) -> None:
        """`remote`: a login to use, which stays open; None: the process has its own login."""
        self.host = host
        self._args = tuple(args)
        self._name = args[3] if args[0] == "sh" else args[0]  # after "sh -c SCRIPT"
        """Name of the process in errors."""
        self._shared, self._remote = remote, None if remote else _login(host)
        self._streams: _Streams | None = None
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unheard = 0
        """Bytes that were read from the process but not yet received by the caller."""
        self._ending = False
        self._room = threading.Condition()
        self._errors = bytearray()
        self._threads: list[threading.Thread] = []

    async def __aenter__(self) -> "AgentProcess":
        """Start the process. Raises RemoteError if the start fails."""
        if (remote := self._shared or self._remote) is not None:
            self._streams = _Channel(await remote.channel(self._args))
        else:
            self._streams = await asyncio.to_thread(_Process, self.host, self._args)
        loop, streams = asyncio.get_running_loop(), self._streams
        for work in (self._hear, self._keep_errors):
            thread = threading.Thread(target=work, args=(loop, streams), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._streams is not None:
            await asyncio.to_thread(self._end, self._streams)
        if self._remote is not None:
            await self._remote.__aexit__()

    def _end(self, streams: _Streams) -> None:
        with self._room:
            self._ending = True
            self._room.notify_all()
        with suppress(OSError, EOFError, paramiko.SSHException):
            streams.no_more()
        for thread in self._threads:
            thread.join(_ENDS_WITHIN)
        with suppress(OSError, EOFError, paramiko.SSHException):
            streams.kill()

    def _hear(self, loop: asyncio.AbstractEventLoop, streams: _Streams) -> None:
        with (
            suppress(OSError, EOFError, paramiko.SSHException, ValueError),
            streams.lines() as lines,
        ):
            while line := lines.readline(_LONGEST):
                self._take(loop, line)
        _tell(loop, self._said, None)

    def _take(self, loop: asyncio.AbstractEventLoop, line: bytes) -> None:
        """Queue a line for the caller. Waits while the queue is full, so the process blocks."""
        with self._room:
            if not self._ending:
                self._unheard += len(line)
                _tell(loop, self._said, line)
                self._room.wait_for(lambda: self._ending or self._unheard <= _LONGEST)

    def _heard(self, size: int) -> None:
        with self._room:
            self._unheard -= size
            self._room.notify_all()

    def _keep_errors(self, _: asyncio.AbstractEventLoop, streams: _Streams) -> None:
        with (
            suppress(OSError, EOFError, paramiko.SSHException, ValueError),
            streams.errors() as errors,
        ):
            while line := errors.readline(_KEPT_ERRORS):
                self._errors += line
                del self._errors[:-_KEPT_ERRORS]

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one message. Raises RemoteError if the process or the connection has ended."""
        assert self._streams is not None
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            await asyncio.to_thread(self._streams.write, line)
        except (OSError, EOFError, paramiko.SSHException) as exc:
            raise self._broken() from exc

    async def receive(self) -> dict[str, Any]:
        """Wait for the next message and return it.

        Raises RemoteError if the process exits without a message, or the message is invalid.
        """
        line = await self._said.get()
        if line is None:
            self._said.put_nowait(None)
            raise self._broken()
        self._heard(len(line))
        try:
            said = json.loads(line)
            if not isinstance(said, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as exc:
            raise RemoteError(
                f"{self.host.name}: invalid message from {self._name}: {line[:80]!r}",
                host=self.host.name,
            ) from exc
        return said

    def _broken(self) -> RemoteError:
        told = self._errors.decode(errors="replace")
        return RemoteError(
            f"{self.host.name}: {self._name} exited: {last_line(told, 'no error message')}",
            host=self.host.name,
            hint=f"run vmckpt doctor {self.host.name}",
        )


def _login(host: Host) -> Remote | None:
    return None if host.ssh is None else Remote(host)


def _tell(
    loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[bytes | None]", line: bytes | None
) -> None:
    with suppress(RuntimeError):  # the loop is closed, so the line is dropped
        loop.call_soon_threadsafe(queue.put_nowait, line)


class _Channel:
    """Streams of a process over ssh."""

    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel

    def write(self, data: bytes) -> None:
        self._channel.sendall(data)

    def lines(self) -> IO[bytes]:
        made: Callable[[str], Any] = self._channel.makefile
        return made("rb")  # type: ignore[no-any-return]

    def errors(self) -> IO[bytes]:
        made: Callable[[str], Any] = self._channel.makefile_stderr
        return made("rb")  # type: ignore[no-any-return]

    def no_more(self) -> None:
        self._channel.shutdown_write()

    def kill(self) -> None:
        self._channel.close()


class _Process:
    """Streams of a process on this machine."""

    def __init__(self, host: Host, args: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as exc:
            raise RemoteError(
                f"{host.name}: cannot start {args[0]}: {exc.strerror}", host=host.name
            ) from exc

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def lines(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def errors(self) -> IO[bytes]:
        assert self._process.stderr is not None
        return self._process.stderr

    def no_more(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GIVES_UP_WITHIN)
        self._process.kill()
        self._process.wait()
