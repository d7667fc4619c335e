"""An nbdkit plugin: a disk that only logs writes.

    nbdkit -U SOCKET python nbdkit_plugin.py log=FILE control=FILE size=BYTES limit=BYTES most=BYTES

A write is answered once it is in the log. While more than `limit` bytes of the log are not
consumed, or the log's file system is full, writes wait. If writes must not wait
(control.never_wait), they are refused beyond `most` bytes, or when the file system is full. The
disk reads as zeros. nbdkit calls one function at a time, so the log is in the order of the replies.
"""

import errno
import os
import sys
import time
from pathlib import Path

import nbdkit  # type: ignore[import-not-found]  # exists only inside nbdkit

# nbdkit runs Debian's own Python, which does not find the vmckpt package by itself.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.log_control import Control

API_VERSION = 2
_TURN = 0.002

_KEYS = ("log", "control", "size", "limit", "most")
_told: dict[str, str] = {}


class _Log:
    """The writer's side of the log."""

    def __init__(self, told: dict[str, str]) -> None:
        self.size = int(told["size"])
        self._limit, self._most = int(told["limit"]), int(told["most"])
        self._file = os.open(told["log"], os.O_WRONLY | os.O_CLOEXEC)
        self._control = Control(Path(told["control"]))

    def begin(self) -> None:
        """Record the process ID of this nbdkit."""
        self._control.process = os.getpid()

    def append(self, *parts: write_log.Buffer) -> None:
        """Append complete records, all or none; wait for space if permitted. Raises OSError."""
        length = sum(map(len, parts))
        self._wait()
        while not self._try(parts, length):
            if self._control.never_wait:
                self._refuse()
            self._pause()

    def _try(self, parts: tuple[write_log.Buffer, ...], length: int) -> bool:
        """Append records, unless there is too little space. Returns whether they were appended.

        Readers ignore data after the offset `written`. Raises OSError for any other failure.
        """
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
        raise OSError(errno.ENOSPC, "the log is full")


_log: _Log


def config(key: str, value: str) -> None:
    """Take one parameter of the command line. Raises ValueError if it is unknown."""
    if key not in _KEYS:
        raise ValueError(f"unknown parameter {key}")
    _told[key] = value


def config_complete() -> None:
    """Open the files given in the parameters. Raises ValueError if a parameter is missing."""
    global _log  # noqa: PLW0603 - a plugin of nbdkit is a module, and this is its state
    missing = [key for key in _KEYS if key not in _told]
    if missing:
        raise ValueError(f"missing parameters: {', '.join(missing)}")
    _log = _Log(_told)


def thread_model() -> int:
    """Have nbdkit handle one request at a time, so that the log is in the order of the replies."""
    return int(nbdkit.THREAD_MODEL_SERIALIZE_ALL_REQUESTS)


def after_fork() -> None:
    """Record that this process is serving the disk."""
    _log.begin()


def open(_readonly: bool) -> int:  # noqa: A001 - nbdkit's name
    """Accept a connection, which needs no state."""
    return 1


def get_size(_handle: int) -> int:
    """Return the size of the disk in bytes."""
    return _log.size


def can_fua(_handle: int) -> int:
    """Report native FUA: no flush is needed after a write was answered."""
    return int(nbdkit.FUA_NATIVE)


def can_fast_zero(_handle: int) -> bool:
    """Report that writing zeros is fast: it takes a record of sixteen bytes."""
    return True


def pread(_handle: int, room: bytearray, _offset: int, _flags: int) -> None:
    """Return zeros; the mirror never reads."""
    room[:] = bytes(len(room))


def pwrite(_handle: int, data: memoryview, offset: int, _flags: int) -> None:
    """Log a write with its data."""
    parts: list[write_log.Buffer] = []
    for begin in range(0, len(data), write_log.LONGEST):
        part = data[begin : begin + write_log.LONGEST]
        parts += (write_log.header(offset + begin, len(part)), part)
    _log.append(*parts)


def zero(_handle: int, count: int, offset: int, _flags: int) -> None:
    """Log that a range reads as zeros."""
    _log.append(write_log.header(offset, count, write_log.ZEROS))


def trim(_handle: int, count: int, offset: int, _flags: int) -> None:
    """Log that a range was discarded."""
    _log.append(write_log.header(offset, count, write_log.TRIM))


def flush(_handle: int, _flags: int) -> None:
    """Do nothing: flushed data is safe once its epoch is committed, and output waits for that."""
