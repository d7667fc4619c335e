"""A program on a host that is spoken with in lines of JSON, for as long as it runs.

Over ssh where the inventory has an address, else as a process of this machine.
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
"""How long a program here may need to put back what it has set, before it is killed."""


class _Streams(Protocol):
    """What a program is spoken with through; all of it blocks."""

    def write(self, data: bytes) -> None: ...

    def lines(self) -> IO[bytes]: ...

    def errors(self) -> IO[bytes]: ...

    def no_more(self) -> None:
        """Nothing more will be said to it."""

    def kill(self) -> None: ...


class AgentProcess:
    """Use as an async context manager: leaving it ends the program, by the end of its input."""

    def __init__(self, host: Host, args: Sequence[str]) -> None:
        self.host = host
        self._args = tuple(args)
        self._remote: Remote | None = None
        self._streams: _Streams | None = None
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unheard = 0
        """Bytes that were read and not heard."""
        self._ending = False
        self._room = threading.Condition()
        self._errors = bytearray()
        self._threads: list[threading.Thread] = []

    async def __aenter__(self) -> "AgentProcess":
        """Raises RemoteError if it cannot be started."""
        if self.host.ssh is not None:
            self._remote = Remote(self.host)
            self._streams = _Channel(await self._remote.channel(self._args))
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
        """One that says more than is heard waits, as any program with a full pipe."""
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
        """Say one thing to it. Raises RemoteError if it hears nothing any more."""
        assert self._streams is not None
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        try:
            await asyncio.to_thread(self._streams.write, line)
        except (OSError, EOFError, paramiko.SSHException) as exc:
            raise self._broken() from exc

    async def receive(self) -> dict[str, Any]:
        """The next thing it says. Raises RemoteError if it ended instead, or talks nonsense."""
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
                f"{self.host.name}: {self._args[0]} says what makes no sense: {line[:80]!r}"
            ) from exc
        return said

    def _broken(self) -> RemoteError:
        told = self._errors.decode(errors="replace")
        return RemoteError(
            f"{self.host.name}: {self._args[0]} ended: {last_line(told, 'without a word')}",
            hint=f"run vmckpt doctor {self.host.name}",
        )


def _tell(
    loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[bytes | None]", line: bytes | None
) -> None:
    with suppress(RuntimeError):  # the loop has ended: nobody listens any more
        loop.call_soon_threadsafe(queue.put_nowait, line)


class _Channel:
    """Over ssh."""

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
    """On this machine."""

    def __init__(self, host: Host, args: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as exc:
            raise RemoteError(f"{host.name}: {args[0]} was not started: {exc.strerror}") from exc

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
