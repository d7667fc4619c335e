"""Read a stream from QEMU through a pipe, as fast as it arrives, in a separate thread."""

import fcntl
import os
import select
import threading
from contextlib import suppress
from typing import Protocol

from vmckpt.capture.migration_settings import PIPE, Commands

# The largest size allowed without privileges; with a large pipe, QEMU's writes wait less often.
_PIPE_SIZE = 1 << 20
_LOOK_UP_MS = 100


class Taker(Protocol):
    """Takes the stream as it arrives, such as a `StreamParser` or a `Tape`."""

    @property
    def flowing(self) -> bool: ...
    def feed(self, data: memoryview) -> None: ...


class Tape:
    """Keeps a short stream in memory, to be parsed later."""

    flowing = False

    def __init__(self) -> None:
        self.data = bytearray()

    def feed(self, data: memoryview) -> None:
        self.data += data


class Drain:
    """The reading end of the pipe. Use as `with Drain(taker) as drain` until the stream has ended.

    A pipe has no path: nothing is left over if this process dies, and QEMU needs no permission to
    open a file.
    """

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # the user's limit for pipes is reached; a small pipe works, too
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self.error: Exception | None = None
        """The error raised by the taker; the rest of the stream is then discarded."""
        self._discarding = False
        self._left = threading.Event()
        self.flowing = threading.Event()
        """Set once the taker reports the first page; QEMU has saved the device state by then."""

    def __enter__(self) -> "Drain":
        return self

    def __exit__(self, *_: object) -> None:
        self._close_writing()
        self._left.set()
        if self._thread.ident is None:
            os.close(self.reading)
        else:
            self._thread.join()

    def hand_over(self, monitor: Commands) -> None:
        """Pass the writing end to QEMU and start reading. Raises HypervisorError."""
        monitor.tell("getfd", {"fdname": PIPE}, files=(self._writing,))
        self._close_writing()
        self._thread.start()

    def _close_writing(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def ended(self, limit: float) -> bool:
        """Wait at most `limit` seconds for the end of the stream. Returns whether it has ended.

        Raises `error`.
        """
        self._thread.join(limit)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()

    def discard(self) -> None:
        """Discard the rest of the stream; it is still read, so that QEMU can finish."""
        self._discarding = True

    def _run(self) -> None:
        try:
            self._read(self.reading)
        finally:
            os.close(self.reading)

    def _read(self, file: int) -> None:
        buffer = bytearray(_PIPE_SIZE)
        view = memoryview(buffer)
        poll = select.poll()
        poll.register(file, select.POLLIN)
        while not self._left.is_set():
            if not poll.poll(_LOOK_UP_MS):
                continue
            length = os.readv(file, [buffer])
            if not length:
                return
            if not self._discarding:
                self._take(view[:length])

    def _take(self, data: memoryview) -> None:
        """Pass data to the taker. After an error, discard the rest, so that QEMU can finish."""
        try:
            self._taker.feed(data)
        except Exception as exc:  # noqa: BLE001 - raised in the waiting thread
            self.error = exc
            self._discarding = True
        if self._taker.flowing and not self.flowing.is_set():
            self.flowing.set()
