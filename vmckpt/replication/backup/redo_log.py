"""What an epoch is kept in until the standby has it, and how the standby gets it: as often as need
be, with the same result each time.

The files are written anew from their beginning with each epoch; that is cheaper than new ones.
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
"""Bytes of a digest."""
# A file that one large epoch has made longer gives the rest back.
_KEPT = 64 * MIB
_PIECE = 4 * MIB
_ROOM = 16 * MIB
"""An epoch is ended when it has so much; one after a long wait may have more."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ANEW = "protect the guest again: its standby must be built anew"

_CHUNK = struct.Struct(">II")
"""Of which memory file or disk, and how many pages or bytes of records follow."""
_HEAD = struct.Struct(f">8sQQ{DIGEST}s")
_MAGIC = b"VMCKLOG1"
BODY = 4096
"""Where the records begin in a disk log."""
_PENDING, _APPLIED = b"P", b"A"


class StageError(VmckptError):
    """An epoch could not be kept; the last committed one is as it was."""


class StageFull(StageError):
    """There is no room left for an epoch; the last committed one is as it was."""


class StageDamaged(StageError):
    """What was committed is not what was written: the standby cannot be relied on."""


def damaged(what: str) -> StageDamaged:
    """The error for what was kept."""
    return StageDamaged(f"{what} is not as it was written", hint=_ANEW)


class Memory(Protocol):
    """A file of the standby's memory; `capture.memory.page_diff.Mapping` is one.

    All of it must be allocated: in a hole that a full tmpfs cannot fill we would be killed.
    """

    @property
    def pages(self) -> NDArray[np.uint64]:
        """All its pages, shape (n, 512); what is written there is in the standby's memory."""
        ...


Noted = Callable[[int, NDArray[np.int64]], None]
"""Is told which pages of which file were just written."""


class Sink(Protocol):
    """One of the standby's disks. What is written later to the same place prevails."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def write(self, offset: int, data: memoryview, /) -> object: ...

    def zeros(self, offset: int, length: int, /) -> object: ...

    def flush(self) -> object:
        """All that was written before is on its disk for good."""
        ...


class Content(NamedTuple):
    """What a file must hold."""

    length: int
    digest: str


NOTHING = Content(0, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The last committed epoch; that its file is there makes it so."""

    epoch: int
    pages: Content
    writes: Content
    state: Content
    slot: int
    """Which of the two state files."""
    final: bool
    taken: float
    standby: str
    """Whose memory and disks they are, with all sizes."""

    def to_bytes(self) -> bytes:
        return _PENDING + json.dumps(asdict(self)).encode()

    @staticmethod
    def load(path: Path) -> "tuple[Record, bool] | None":
        """A record, and whether it was applied; None: there is none. Raises StageDamaged."""
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


def publish(record: Record, path: Path) -> None:
    """Commit an epoch: its record appears whole or not at all. Raises OSError."""
    new = path.with_suffix(".new")
    _write(new, record.to_bytes(), os.O_CREAT | os.O_TRUNC)
    new.rename(path)


def mark_applied(path: Path) -> None:
    """One byte of what is there already, so that it needs no room. Raises OSError."""
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
    """Say what the system said, in this room's words."""
    try:
        yield
    except OSError as exc:
        why = os.strerror(exc.errno or errno.EIO)
        if exc.errno in _FULL:
            raise StageFull(f"{what}: {why}", hint="make room on the standby's host") from exc
        raise StageError(f"{what}: {why}", hint="see the log of the standby's host") from exc


class StagedFile:
    """A file that is filled with what belongs to one epoch, and then with the next one's."""

    def __init__(self, path: Path, *, begin: int = 0) -> None:
        """`begin`: so many bytes at the front are somebody else's. Raises OSError."""
        self.path, self._begin = path, begin
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._hash = blake3()
        self.length = 0
        """Bytes of the epoch that is being written."""

    def close(self) -> None:
        os.close(self.file)

    def rewind(self) -> None:
        """Write from the beginning; what the file held is lost bit by bit."""
        self._hash, self.length = blake3(), 0

    def append(self, *parts: bytes | memoryview) -> None:
        """Raises OSError; the file is as long as before then."""
        here = self._begin + self.length
        for part in parts:
            left = memoryview(part).cast("B")
            self._hash.update(left)
            while left:
                done = os.pwrite(self.file, left, here)
                left, here = left[done:], here + done
        self.length = here - self._begin

    def content(self, *more: bytes) -> Content:
        """What was written since `rewind`; `more` is only part of the digest."""
        told = self._hash.copy()
        for one in more:
            told.update(one)
        return Content(self.length, told.digest(DIGEST).hex())

    def holds(self, content: Content, *more: bytes) -> bool:
        """Whether it has what it must have; all of it is read. Raises OSError."""
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
        """Read as much as there is room for; False if the file is shorter. Raises OSError."""
        here += self._begin
        while room:
            done = os.preadv(self.file, [room], here)
            if not done:
                return False
            room, here = room[done:], here + done
        return True

    def read(self, here: int, length: int) -> memoryview:
        """Raises OSError, StageDamaged."""
        room = memoryview(bytearray(length))
        if not self.fill(here, room):
            raise damaged(str(self.path))
        return room

    def trim(self) -> None:
        if os.fstat(self.file).st_size > self._begin + _KEPT:
            os.ftruncate(self.file, self._begin + _KEPT)


class DiskLog(StagedFile):
    """The disk writes of an epoch, on a disk, with a head that says whether they are all there."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, begin=BODY)
        head = self.head()
        self.sealed = head[0] if head is not None else 0
        """The epoch that the head names; 0: none. Since then the disks were whole."""

    def head(self) -> tuple[int, Content] | None:
        """What the head names; None: no epoch was sealed since the disks were last copied anew."""
        data = os.pread(self.file, _HEAD.size, 0)
        if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
            return None
        _, epoch, length, digest = _HEAD.unpack(data)
        return epoch, Content(length, digest.hex())

    def seal(self, epoch: int) -> Content:
        """All that was written is this epoch's, and on the disk for good. Raises OSError."""
        content = self.content(_number(epoch))
        digest = bytes.fromhex(content.digest)
        self.sealed = epoch
        os.pwrite(self.file, _HEAD.pack(_MAGIC, epoch, content.length, digest), 0)
        os.fdatasync(self.file)
        return content

    def reseal(self, epoch: int) -> None:
        """What it holds was not committed; the disks are as they were at `epoch`.

        0: they are nothing whole. Raises OSError.
        """
        self.rewind()
        if epoch:
            self.seal(epoch)
            return
        os.pwrite(self.file, bytes(_HEAD.size), 0)
        os.fdatasync(self.file)
        self.sealed = 0

    def holds_epoch(self, epoch: int, content: Content) -> bool:
        """Whether it has all that it must have. Raises OSError."""
        return self.head() == (epoch, content) and self.holds(content, _number(epoch))


def _number(epoch: int) -> bytes:
    return epoch.to_bytes(8, "big")


def try_room(folder: Path) -> None:
    """Raises OSError unless an epoch of some size would find room there."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _ROOM)


def add_pages(
    file: StagedFile, which: int, numbers: NDArray[np.intp], pages: NDArray[np.uint64]
) -> None:
    """Raises OSError."""
    told = np.ascontiguousarray(numbers, dtype=np.int64)
    file.append(
        _CHUNK.pack(which, len(told)), told.data, np.ascontiguousarray(pages).reshape(-1).data
    )


def add_writes(file: StagedFile, which: int, data: bytes) -> None:
    """Raises OSError."""
    file.append(_CHUNK.pack(which, len(data)), data)


def put_pages(
    file: StagedFile, length: int, memory: Sequence[Memory], noted: Noted | None = None
) -> None:
    """Give the standby the pages that a file holds. Raises OSError, StageDamaged."""
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
    """Give the standby's disks the writes that a file holds, for good.

    Raises OSError, StageDamaged, and what the disks raise.
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
    """One after the other; what nobody needs any more becomes zeros. Raises what the disk does."""
    for record in records(data):
        if record.kind == DATA and record.data is not None:
            disk.write(record.offset, record.data)
        else:
            disk.zeros(record.offset, record.length)


def check_records(data: bytes, size: int) -> None:
    """Raises ValueError unless they are whole records of a disk of `size` bytes."""
    for record in records(data):
        if record.end > size:
            raise ValueError(f"a write at {record.offset} ends beyond the disk's {size} bytes")
