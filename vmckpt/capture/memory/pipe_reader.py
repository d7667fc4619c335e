"""Takes a stream from QEMU through a pipe, as fast as it comes, in a thread of its own."""

import fcntl
import os
import select
import threading
from contextlib import suppress
from typing import Protocol

from vmckpt.capture.migration_settings import PIPE, Commands

# The most that anybody may ask for; QEMU's writes wait less often with a long pipe.
_PIPE_SIZE = 1 << 20
_LOOK_UP_MS = 100


class Taker(Protocol):
    """Takes the stream as it comes: `StreamParser`, or a `Tape`."""

    @property
    def flowing(self) -> bool: ...
    def feed(self, data: memoryview) -> None: ...


class Tape:
    """Keeps a short stream, to be parsed when there is time."""

    flowing = False

    def __init__(self) -> None:
        self.data = bytearray()

    def feed(self, data: memoryview) -> None:
        self.data += data


class Drain:
    """The reading end. Use as `with Drain(taker) as drain`; leave it when QEMU is through with it.

    A pipe is bound to no path: nothing is left of it however we end, and QEMU needs no leave to
    open anything.
    """

    def __init__(self, taker: Taker) -> None:
        self._taker = taker
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self.reading, self._writing = os.pipe2(os.O_CLOEXEC)
        with suppress(OSError):  # somebody has many pipes; a short one will do
            fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self.error: Exception | None = None
        """What went wrong with what came; the rest is taken and forgotten."""
        self._discarding = False
        self._left = threading.Event()
        self.flowing = threading.Event()
        """Set once the first page has come: QEMU has the device state by then."""

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
        """Give the writing end to QEMU and begin to read. Raises HypervisorError."""
        monitor.tell("getfd", {"fdname": PIPE}, files=(self._writing,))
        self._close_writing()
        self._thread.start()

    def _close_writing(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            self._writing = -1

    def ended(self, limit: float) -> bool:
        """Wait for QEMU to close its end, at most so long. Raises `error`."""
        self._thread.join(limit)
        if self.error is not None:
            raise self.error
        return not self._thread.is_alive()

    def discard(self) -> None:
        """Take what still comes, and forget it."""
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
        """Whatever goes wrong here, QEMU must get rid of its stream."""
        try:
            self._taker.feed(data)
        except Exception as exc:  # noqa: BLE001 - handed to whoever waits
            self.error = exc
            self._discarding = True
        if self._taker.flowing and not self.flowing.is_set():
            self.flowing.set()
