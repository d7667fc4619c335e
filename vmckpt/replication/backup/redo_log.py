"""The files that store an epoch until it is applied to the standby, and functions to apply them.

An epoch can be applied any number of times with the same result. Each epoch overwrites the files
from the beginning, which is cheaper than creating new files.
"""

import errno
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import VmckptError
from vmckpt.replication.disks.write_log import DATA, records
from vmckpt.units import MIB

DIGEST = 16
"""Length of a digest, in bytes."""
# A file that a large epoch has made longer is truncated to this length afterwards.
_KEPT = 64 * MIB
_PIECE = 4 * MIB
_ROOM = 16 * MIB
"""Space that must be free for an epoch. An epoch ends early once the log of a disk has this many
bytes, but an epoch after a long wait may be larger."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ANEW = "run vmckpt unprotect GUEST, then vmckpt protect GUEST --to HOST, to rebuild the standby"

_CHUNK = struct.Struct(">II")
"""Number of the memory file or disk, and the number of pages or record bytes that follow."""
_HEAD = struct.Struct(f">8sQQ{DIGEST}s")
_MAGIC = b"VMCKLOG1"
BODY = 4096
"""Offset of the first record in a disk log."""
_PENDING, _APPLIED = b"P", b"A"


class StageError(VmckptError):
    """The stage cannot be used, or an epoch could not be staged, committed or applied."""


class StageFull(StageError):
    """There is not enough space for an epoch; the last committed epoch is unchanged."""


class StageDamaged(StageError):
    """Committed data differs from what was written: the standby cannot be used."""


def damaged(what: str) -> StageDamaged:
    """Return the error for staged data that is damaged; `what` names it."""
    return StageDamaged(f"{what} is damaged", hint=_ANEW)


class Memory(Protocol):
    """A file of the standby's memory, for example a `capture.memory.page_diff.Mapping`.

    The file must be fully allocated: on a full tmpfs, writing to a hole kills the process.
    """

    @property
    def pages(self) -> NDArray[np.uint64]:
        """All pages, shape (n, 512); writing to this array writes to the standby's memory."""
        ...


Noted = Callable[[int, NDArray[np.int64]], None]
"""Called with a file's number and the numbers of the pages that were just written."""


class Sink(Protocol):
    """A disk of the standby. If two writes overlap, the later write prevails."""

    @property
    def size(self) -> int:
        """Size of the disk, in bytes."""
        ...

    def write(self, offset: int, data: memoryview, /) -> object: ...

    def zeros(self, offset: int, length: int, /) -> object: ...

    def flush(self) -> object:
        """Wait until all earlier writes are on stable storage."""
        ...


class Content(NamedTuple):
    """The length and digest of a file's content."""

    length: int
    digest: str


NOTHING = Content(0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of the last committed epoch. The epoch is committed once this file exists."""

    epoch: int
    pages: Content
    writes: Content
    state: Content
    slot: int
    """Index of the state file, 0 or 1."""
    final: bool
    taken: float
    standby: str
    """Identifies the standby's process, with the sizes of its memory and disks."""

    def to_bytes(self, *, applied: bool = False) -> bytes:
        mark = _APPLIED if applied else _PENDING
        return mark + json.dumps(asdict(self)).encode()

    @staticmethod
    def load(path: Path) -> "tuple[Record, bool] | None":
        """Read a record. Returns the record and whether it was applied; None: no record exists.

        Raises StageDamaged, OSError.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            told = json.loads(data[1:])
            for name in ("pages", "writes", "state"):
                told[name] = Content(*told[name])
            return Record(**told), {_PENDING: False, _APPLIED: True}[data[:1]]
        except (ValueError, TypeError, LookupError) as exc:
            raise damaged(str(path)) from exc


def publish(record: Record, path: Path, *, applied: bool = False) -> None:
    """Commit an epoch by writing its record atomically. `applied`: it is already applied.

    Raises OSError.
    """
    new = path.with_suffix(".new")
    _write(new, record.to_bytes(applied=applied), os.O_CREAT | os.O_TRUNC)
    new.rename(path)


def mark_applied(path: Path) -> None:
    """Mark the record as applied. Overwrites one byte, so no space is needed. Raises OSError."""
    _write(path, _APPLIED)


def _write(path: Path, data: bytes, flags: int = 0) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o600)
    try:
        if os.pwrite(file, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn an OSError into a StageError, or into StageFull if there is no space.

    `what`: the action that failed, or its files, for the message.
    """
    try:
        yield
    except OSError as exc:
        why = os.strerror(exc.errno or errno.EIO)
        if exc.errno in _FULL:
            raise StageFull(f"{what}: {why}", hint="free some space on the standby's host") from exc
        raise StageError(f"{what}: {why}", hint="run journalctl -k on the standby's host") from exc


class StagedFile:
    """A file that stores the data of one epoch, and is overwritten by the next epoch."""

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        """`begin`: bytes at the start of the file that are reserved. Raises OSError."""
        self.path, self._begin = path, begin
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._hash = blake3()
        self.length = 0
        """Bytes of the current epoch that have been written."""

    def close(self) -> None:
        os.close(self.file)

    def rewind(self) -> None:
        """Start again from the beginning; new data overwrites the old content."""
        self._hash, self.length = blake3(), 0

    def append(self, *parts: bytes | memoryview) -> None:
        """Append data. Raises OSError; in that case, `length` is unchanged."""
        here = self._begin + self.length
        for part in parts:
            left = memoryview(part).cast("B")
            self._hash.update(left)
            while left:
                done = os.pwrite(self.file, left, here)
                left, here = left[done:], here + done
        self.length = here - self._begin

    def content(self, *more: bytes) -> Content:
        """Return the length and digest of the data appended since `rewind`.

        The digest also covers `more`.
        """
        told = self._hash.copy()
        for one in more:
            told.update(one)
        return Content(self.length, told.digest(DIGEST).hex())

    def holds(self, content: Content, *more: bytes) -> bool:
        """Return whether the file has this content; reads it completely. Raises OSError."""
        told, room = blake3(), memoryview(bytearray(min(_PIECE, content.length)))
        for here in range(0, content.length, _PIECE):
            piece = room[: content.length - here]
            if not self.fill(here, piece):
                return False
            told.update(piece)
        for one in more:
            told.update(one)
        return told.digest(DIGEST).hex() == content.digest

    def fill(self, here: int, room: memoryview) -> bool:
        """Fill `room` from offset `here`. Returns False if the file is shorter. Raises OSError."""
        here += self._begin
        while room:
            done = os.preadv(self.file, [room], here)
            if not done:
                return False
            room, here = room[done:], here + done
        return True

    def read(self, here: int, length: int) -> memoryview:
        """Read `length` bytes at offset `here`. Raises OSError, StageDamaged if any are missing."""
        room = memoryview(bytearray(length))
        if not self.fill(here, room):
            raise damaged(str(self.path))
        return room

    def trim(self) -> None:
        if os.fstat(self.file).st_size > self._begin + _KEPT:
            os.ftruncate(self.file, self._begin + _KEPT)


class DiskLog(StagedFile):
    """A file on a disk for an epoch's disk writes. The header shows whether they are complete."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, begin=BODY)
        head = self.head()
        self.sealed = head[0] if head is not None else 0
        """The epoch in the header; the disks have been consistent since then. 0: no epoch."""

    def head(self) -> tuple[int, Content] | None:
        """Read the epoch and its content from the header.

        Returns None if no epoch has been sealed since the most recent first copy of the disks.
        Raises OSError.
        """
        data = os.pread(self.file, _HEAD.size, 0)
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
            return None
        _, epoch, length, digest = _HEAD.unpack(data)
        return epoch, Content(length, digest.hex())

    def seal(self, epoch: int) -> Content:
        """Write an epoch's header and sync the file. Returns the file's content. Raises OSError."""
        content = self.content(_number(epoch))
        digest = bytes.fromhex(content.digest)
        self.sealed = epoch
        os.pwrite(self.file, _HEAD.pack(_MAGIC, epoch, content.length, digest), 0)
        os.fdatasync(self.file)
        return content

    def reseal(self, epoch: int) -> None:
        """Discard uncommitted writes: the disks are in the state of `epoch`.

        `epoch` is 0 if the disks are not consistent. Raises OSError.
        """
        self.rewind()
        if epoch:
            self.seal(epoch)
            return
        os.pwrite(self.file, bytes(_HEAD.size), 0)
        os.fdatasync(self.file)
        self.sealed = 0

    def holds_epoch(self, epoch: int, content: Content) -> bool:
        """Return whether the log has this epoch with this content. Raises OSError."""
        return self.head() == (epoch, content) and self.holds(content, _number(epoch))


def _number(epoch: int) -> bytes:
    return epoch.to_bytes(8, "big")


def try_room(folder: Path) -> None:
    """Check that the directory has space for an epoch of 16 MiB. Raises OSError if it does not."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM)


def add_pages(
    file: StagedFile, which: int, numbers: NDArray[np.intp], pages: NDArray[np.uint64]
) -> None:
    """Append pages of the memory file `which` to a staged file. Raises OSError."""
    told = np.ascontiguousarray(numbers, dtype=np.int64)
    file.append(
        _CHUNK.pack(which, len(told)), told.data, np.ascontiguousarray(pages).reshape(-1).data
    )


def add_writes(file: StagedFile, which: int, data: bytes) -> None:
    """Append records of writes to the disk `which` to a staged file. Raises OSError."""
    file.append(_CHUNK.pack(which, len(data)), data)


def put_pages(
    file: StagedFile, length: int, memory: Sequence[Memory], noted: Noted | None = None
) -> None:
    """Apply the pages in a staged file's first `length` bytes to the standby's memory.

    `noted` is called for the pages once they are written. Raises OSError, StageDamaged.
    """
    room = np.empty((min(_PIECE, length) // PAGE, PAGE // 8), dtype=np.uint64)
    here = 0
    while here < length:
        which, count = _CHUNK.unpack(file.read(here, _CHUNK.size))
        numbers = np.frombuffer(file.read(here + _CHUNK.size, 8 * count), dtype=np.int64)
        here += _CHUNK.size + 8 * count
        for first in range(0, count, _PIECE // PAGE):
            some = numbers[first : first + _PIECE // PAGE]
            part = room[: len(some)]
            if not file.fill(here, part.reshape(-1).data.cast("B")):
                raise damaged(str(file.path))
            memory[which].pages[some] = part
            if noted is not None:
                noted(which, some)
            here += part.nbytes


def put_writes(file: StagedFile, length: int, disks: Sequence[Sink]) -> None:
    """Apply the writes in a staged file's first `length` bytes to the standby's disks; flush them.

    Raises OSError, StageDamaged, and any error of the disks.
    """
    here, touched = 0, set()
    while here < length:
        which, size = _CHUNK.unpack(file.read(here, _CHUNK.size))
        write_records(file.read(here + _CHUNK.size, size), disks[which])
        touched.add(which)
        here += _CHUNK.size + size
    for which in sorted(touched):
        disks[which].flush()


def write_records(data: bytes | memoryview, disk: Sink) -> None:
    """Apply records to a disk in order; trimmed ranges become zeros.

    Raises ValueError for an invalid record, and any error of the disk.
    """
    for record in records(data):
        if record.kind == DATA and record.data is not None:
            disk.write(record.offset, record.data)
        else:
            disk.zeros(record.offset, record.length)


def check_records(data: bytes, size: int) -> None:
    """Check that `data` consists of complete records for a disk of `size` bytes.

    Raises ValueError.
    """
    for record in records(data):
        if record.end > size:
            raise ValueError(f"a write at {record.offset} exceeds the disk's {size} bytes")
