"""The write log of a replicated disk on the guest's host: nbdkit appends, and the agent consumes.

While the guest is paused and no write is in flight, the size of the log marks the end of an epoch.
The space of an acknowledged epoch is freed by punching a hole; offsets keep growing.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vmckpt.errors import VmckptError
from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.log_control import Control
from vmckpt.units import MIB, Seconds

CHUNK = 4 * MIB
"""Number of bytes to read from the log at once."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class DiskLogError(VmckptError):
    """The write log of a disk cannot be created, served, read, freed or removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """The location of the write log of one disk of a guest."""

    folder: Path
    """A directory on tmpfs for this guest only, which only root can read."""
    disk: int
    """Number of the replicated disk, from 0."""

    @property
    def log(self) -> Path:
        return self.folder / f"disk{self.disk}.log"

    @property
    def control(self) -> Path:
        return self.folder / f"disk{self.disk}.control"


class WriteLog:
    """The agent's side of a write log. A new agent continues from the last consumed offset."""

    def __init__(self, place: LogPlace) -> None:
        """Open the log. Raises DiskLogError on failure, for example if there is no log."""
        self._what, self._log = f"the write log {place.log}", place.log
        with ExitStack() as undo:
            try:
                self._control = undo.enter_context(Control(place.control))
                self._file = os.open(place.log, os.O_RDWR | os.O_CLOEXEC)
            except (OSError, ValueError) as exc:
                raise DiskLogError(f"{self._what} cannot be opened: {exc}") from exc
            undo.callback(os.close, self._file)
            # An earlier agent may have died after setting `consumed`, before freeing the space.
            self._punch(0, self.consumed)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. The log and its nbdkit process remain."""
        os.close(self._file)
        self._control.close()

    def size(self) -> int:
        """Return the offset where the last complete record ends: all answered writes precede it."""
        return self._control.written

    @property
    def consumed(self) -> int:
        """The offset where the part of the log that is still needed begins."""
        return self._control.consumed

    def failed(self) -> str | None:
        """Return why the log may lack writes; None: it is complete.

        Either a write was refused, or nbdkit is gone, which QEMU notices only at its next write.
        """
        if self._control.failed:
            return os.strerror(self._control.failed)
        return None if nbdkit_process(self._log, self._control) else "its nbdkit process is gone"

    def waited(self) -> Seconds:
        """Return the total time for which the guest's writes have waited for space in the log."""
        return Seconds(self._control.waited / 1e9)

    def set_open(self, on: bool) -> None:
        """Set whether writes continue even if too much of the log is not consumed.

        Switch this on before the guest is paused, since pausing waits for the writes in flight.
        Switch it off again afterwards.
        """
        self._control.never_wait = on

    def read(self, first: int, end: int, *, most: int = CHUNK) -> Iterator[bytes]:
        """Yield the log from offset `first` to `end`, in pieces of complete records.

        `most`: maximum size of a piece, at least the size of the longest record. Raises
        DiskLogError if the log cannot be read, and ValueError if `most` is too small, or if an
        offset is outside the part of the log that is not consumed.
        """
        if most < write_log.LONGEST + write_log.HEADER.size:
            raise ValueError(f"pieces of {most} bytes may be too small for a record")
        if not self.consumed <= first <= end <= self.size():
            raise ValueError(f"{self._what} has no bytes {first} to {end}")
        while first < end:
            try:
                data = os.pread(self._file, min(most, end - first), first)
                length = write_log.whole(data)
            except (OSError, ValueError) as exc:
                raise DiskLogError(f"{self._what} cannot be read at {first}: {exc}") from exc
            if not length:
                raise DiskLogError(f"{self._what} has no complete record at {first}")
            yield data if length == len(data) else data[:length]
            first += length

    def consume(self, end: int) -> None:
        """Free the log before offset `end`, which is not needed any more; waiting writes continue.

        Raises DiskLogError, and ValueError if `end` is before the consumed or beyond the written
        offset.
        """
        first = self.consumed
        if not first <= end <= self.size():
            raise ValueError(f"{self._what} cannot be consumed from {first} to {end}")
        # Set the offset first: an agent that dies in between leaves unfreed space, but loses no
        # data.
        self._control.consumed = end
        self._punch(first, end)

    def _punch(self, first: int, end: int) -> None:
        # Only complete pages are freed, so start with the page that was partly consumed before.
        begin = first - first % mmap.PAGESIZE
        try:
            punch(self._file, begin, end - begin)
        except OSError as exc:
            raise DiskLogError(
                f"the consumed part of {self._what} cannot be freed: {exc.strerror}"
            ) from exc


def nbdkit_process(log: Path, control: Control) -> int | None:
    """Return the process ID of the nbdkit that writes a log; None if it is not running."""
    process = control.process
    with suppress(OSError):
        # The process ID may since have been reused for another process.
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if os.fsencode(f"log={log}") in words:
            return process
    return None


def punch(file: int, begin: int, length: int) -> None:
    """Free a range of a file, without changing its size. Raises OSError."""
    if length > 0 and _fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, begin, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
