"""A replicated disk's writes on the guest's host: nbdkit fills the log and the agent empties it.

While the guest stands still and no write is under way the log's size is an epoch's end. What an
acknowledged epoch held is given back to the machine; offsets go on, they never begin anew.
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
"""Bytes of the log that are read at once."""

_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class DiskLogError(VmckptError):
    """The log of a disk's writes cannot be made, read or emptied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlace:
    """Where the log of one disk of a guest lies."""

    folder: Path
    """On tmpfs, of this guest alone, and nobody else's to read."""
    disk: int
    """Which of the guest's replicated disks, from 0 on."""

    @property
    def log(self) -> Path:
        return self.folder / f"disk{self.disk}.log"

    @property
    def control(self) -> Path:
        return self.folder / f"disk{self.disk}.control"


class WriteLog:
    """The agent's end. A new agent goes on where the old one has consumed to."""

    def __init__(self, place: LogPlace) -> None:
        """Raises DiskLogError if there is no such log."""
        self._what, self._log = f"the write log {place.log}", place.log
        with ExitStack() as undo:
            try:
                self._control = undo.enter_context(Control(place.control))
                self._file = os.open(place.log, os.O_RDWR | os.O_CLOEXEC)
            except (OSError, ValueError) as exc:
                raise DiskLogError(f"{self._what} cannot be opened: {exc}") from exc
            undo.callback(os.close, self._file)
            # An agent may have died right after it had moved the mark.
            self._punch(0, self.consumed)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The log and its nbdkit stay."""
        os.close(self._file)
        self._control.close()

    def size(self) -> int:
        """Where the last whole record ends: everything that has been answered lies before."""
        return self._control.written

    @property
    def consumed(self) -> int:
        """Where what is still needed begins."""
        return self._control.consumed

    def failed(self) -> str | None:
        """Why the log is not the whole truth any more: a write was refused, or nbdkit has ended,
        which QEMU notices only at the next write. None: it is whole."""
        if self._control.failed:
            return os.strerror(self._control.failed)
        return None if nbdkit_process(self._log, self._control) else "its nbdkit has ended"

    def waited(self) -> Seconds:
        """For how long the guest's writes have waited for room in the log, in all."""
        return Seconds(self._control.waited / 1e9)

    def set_open(self, on: bool) -> None:
        """Whether writes go on although too much of the log is not consumed.

        It must be on before `stop`, which waits for the writes under way, and off again after it.
        """
        self._control.never_wait = on

    def read(self, first: int, end: int, *, most: int = CHUNK) -> Iterator[bytes]:
        """What was written from `first` to `end`, in pieces of whole records.

        A piece has at most `most` bytes, of which there must be more than the longest record has.
        Raises DiskLogError if that is not what is there, and ValueError if it cannot be there.
        """
        if most < write_log.LONGEST + write_log.HEADER.size:
            raise ValueError(f"a piece of {most} bytes may not hold a record")
        if not self.consumed <= first <= end <= self.size():
            raise ValueError(f"{self._what} has no bytes {first} to {end}")
        while first < end:
            try:
                data = os.pread(self._file, min(most, end - first), first)
                length = write_log.whole(data)
            except (OSError, ValueError) as exc:
                raise DiskLogError(f"{self._what} cannot be read at {first}: {exc}") from exc
            if not length:
                raise DiskLogError(f"{self._what} has no whole record at {first}")
            yield data if length == len(data) else data[:length]
            first += length

    def consume(self, end: int) -> None:
        """Everything before `end` is on the backup: its room is free, writes that wait go on.

        Raises DiskLogError, and ValueError if it goes back or beyond what is written.
        """
        first = self.consumed
        if not first <= end <= self.size():
            raise ValueError(f"{self._what} cannot be consumed from {first} to {end}")
        # This first: who dies here leaves too much behind, and never too little.
        self._control.consumed = end
        self._punch(first, end)

    def _punch(self, first: int, end: int) -> None:
        # Only whole pages are given back, so one that was consumed in part is taken along again.
        begin = first - first % mmap.PAGESIZE
        try:
            punch(self._file, begin, end - begin)
        except OSError as exc:
            raise DiskLogError(f"{self._what} cannot be emptied: {exc.strerror}") from exc


def nbdkit_process(log: Path, control: Control) -> int | None:
    """The number of the nbdkit that writes a log; None if it does not run."""
    process = control.process
    with suppress(OSError):
        # The number may be another process's by now.
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        if os.fsencode(f"log={log}") in words:
            return process
    return None


def punch(file: int, begin: int, length: int) -> None:
    """Give a part of a file back, which stays as long as it is. Raises OSError."""
    if length > 0 and _fallocate(file, _KEEP_SIZE | _PUNCH_HOLE, begin, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
