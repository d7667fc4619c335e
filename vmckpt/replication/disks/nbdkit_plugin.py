"""A plugin of nbdkit: a disk that only remembers what is written to it, in a log.

    nbdkit -U SOCKET python nbdkit_plugin.py log=FILE control=FILE size=BYTES limit=BYTES most=BYTES

A write is answered when it is in the log. If more than `limit` bytes of the log are not consumed
yet, it waits for that first; where none may wait (control.never_wait), it is refused beyond `most`.
The disk reads as zeros. nbdkit calls one function at a time, so the log's order is the answers'.
"""

import errno
import os
import sys
import time
from pathlib import Path

import nbdkit  # type: ignore[import-not-found]  # there is one only inside of nbdkit

# nbdkit runs Debian's own Python, which does not know where this package is.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.log_control import Control

API_VERSION = 2
_TURN = 0.002

_KEYS = ("log", "control", "size", "limit", "most")
_told: dict[str, str] = {}


class _Log:
    """The log's writing end."""

    def __init__(self, told: dict[str, str]) -> None:
        self.size = int(told["size"])
        self._limit, self._most = int(told["limit"]), int(told["most"])
        self._file = os.open(told["log"], os.O_WRONLY | os.O_CLOEXEC)
        self._control = Control(Path(told["control"]))

    def begin(self) -> None:
        """Say who serves it."""
        self._control.process = os.getpid()

    def append(self, *parts: write_log.Buffer) -> None:
        """Whole records, at once or not at all. Raises OSError if there is no room for them."""
        length = sum(map(len, parts))
        self._wait()
        while not self._try(parts, length):
            if self._control.never_wait:
                self._refuse()
            self._pause()

    def _try(self, parts: tuple[write_log.Buffer, ...], length: int) -> bool:
        """Whether there was room. What lies behind `written` is nothing yet."""
        end = self._control.written
        try:
            done = os.pwritev(self._file, parts, end)
        except OSError as exc:
            if exc.errno != errno.ENOSPC:
                self._control.failed = exc.errno or errno.EIO
                raise
            return False
        if done < length:
            return False
        self._control.written = end + length
        return True

    def _wait(self) -> None:
        control = self._control
        while (much := control.written - control.consumed) > self._limit:
            if control.never_wait:
                if much > self._most:
                    self._refuse()
                return
            self._pause()

    def _pause(self) -> None:
        before = time.monotonic_ns()
        time.sleep(_TURN)
        self._control.waited += time.monotonic_ns() - before

    def _refuse(self) -> None:
        self._control.failed = errno.ENOSPC
        nbdkit.set_error(errno.ENOSPC)
        raise OSError(errno.ENOSPC, "the log has no room")


_log: _Log


def config(key: str, value: str) -> None:
    """Take one parameter."""
    if key not in _KEYS:
        raise ValueError(f"unknown parameter {key}")
    _told[key] = value


def config_complete() -> None:
    """Open the files that were named."""
    global _log  # noqa: PLW0603 - a plugin of nbdkit is a module, and this is its state
    missing = [key for key in _KEYS if key not in _told]
    if missing:
        raise ValueError(f"missing: {', '.join(missing)}")
    _log = _Log(_told)


def thread_model() -> int:
    """One request at a time: the order of the log is the order of the answers."""
    return int(nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS)


def after_fork() -> None:
    """Say that it serves, and who."""
    _log.begin()


def open(_readonly: bool) -> int:  # noqa: A001 - nbdkit's name
    """A connection needs nothing of its own."""
    return 1


def get_size(_handle: int) -> int:
    """Bytes of the disk."""
    return _log.size


def can_fua(_handle: int) -> int:
    """A write is as safe as it will be when it is answered."""
    return int(nbdkit.FUA_NATIVE)


def can_fast_zero(_handle: int) -> bool:
    """Zeros are a record of sixteen bytes."""
    return True


def pread(_handle: int, room: bytearray, _offset: int, _flags: int) -> None:
    """Zeros: the mirror never reads."""
    room[:] = bytes(len(room))


def pwrite(_handle: int, data: memoryview, offset: int, _flags: int) -> None:
    """Put the content into the log."""
    parts: list[write_log.Buffer] = []
    for begin in range(0, len(data), write_log.LONGEST):
        part = data[begin : begin + write_log.LONGEST]
        parts += (write_log.header(offset + begin, len(part)), part)
    _log.append(*parts)


def zero(_handle: int, count: int, offset: int, _flags: int) -> None:
    """Put it into the log that this reads as zeros."""
    _log.append(write_log.header(offset, count, write_log.ZEROS))


def trim(_handle: int, count: int, offset: int, _flags: int) -> None:
    """Put it into the log that nobody needs this."""
    _log.append(write_log.header(offset, count, write_log.TRIM))


def flush(_handle: int, _flags: int) -> None:
    """What a guest flushes is safe when its epoch is committed; nothing of it gets out before."""
