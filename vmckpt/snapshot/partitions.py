"""Find a disk's partitions and their file systems by reading a few sectors. Pure."""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[int, int], bytes]
"""Reads `length` bytes at `offset`: (offset, length) -> bytes."""

_SECTOR = 512
_MBR_ROW = struct.Struct("<B3xB3xII")
_EXTENDED = (0x05, 0x0F, 0x85)
_PROTECTIVE = 0xEE
_MOST_ENTRIES = 128
_MOST_LOGICAL = 64
_MARKS = (
    (1024 + 56, b"\x53\xef", "ext4"),
    (0, b"XFSB", "xfs"),
    (0x10040, b"_BHRfS_M", "btrfs"),
    (3, b"NTFS    ", "ntfs"),
    (3, b"EXFAT   ", "exfat"),
    (82, b"FAT32   ", "vfat"),
    (54, b"FAT16   ", "vfat"),
    (54, b"FAT12   ", "vfat"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (512, b"LABELONE", "LVM"),
    (0, b"hsqs", "squashfs"),
    (0x1000 - 10, b"SWAPSPACE2", "swap"),
)
"""Offset, magic and name of each file system; ext2 and ext3 count as ext4."""


@dataclass(frozen=True, slots=True)
class Part:
    """A partition or a whole disk."""

    number: int
    """The partition's number in Linux; 0: the whole disk."""
    start: int
    size: int
    kind: str
    """File system: "ext4", "xfs", …; empty if unknown."""

    def __str__(self) -> str:
        name = f"partition {self.number}" if self.number else "the whole disk"
        return f"{name} ({self.kind or 'unknown content'}, {self.size >> 20} MiB)"


def parts(read: Read, size: int) -> tuple[Part, ...]:
    """Return a disk's partitions, or the whole disk if there are none. `size` is in bytes."""
    # The first sector of a file system can look like a partition table, but not vice versa.
    if kind := kind_at(read, 0, size):
        return (Part(0, 0, size, kind),)
    found = [
        Part(number, start, length, kind_at(read, start, length))
        for number, start, length in _stretches(read, size)
        if start > 0 and length > 0 and start + length <= size
    ]
    return tuple(found) or (Part(0, 0, size, ""),)


def kind_at(read: Read, start: int, length: int) -> str:
    """Return the kind of the file system in a partition; empty if it is unknown.

    `start`, `length`: the partition's offset on the disk and its size, in bytes.
    """
    for offset, mark, kind in _MARKS:
        end = offset + len(mark)
        if end <= length and bytes(read(start + offset, len(mark))) == mark:
            return kind
    return ""


def _stretches(read: Read, size: int) -> Iterator[tuple[int, int, int]]:
    if size < 2 * _SECTOR:
        return
    rows = list(_rows(read(0, _SECTOR)))
    if any(kind == _PROTECTIVE for kind, _, _ in rows):
        for sector in (512, 4096):
            if size >= 2 * sector and read(sector, 8) == b"EFI PART":
                yield from _gpt(read, sector, size)
                return
    for number, (kind, start, count) in enumerate(rows, 1):
        if kind in _EXTENDED:
            yield from _logical(read, start, size)
        elif kind:
            yield number, start * _SECTOR, count * _SECTOR


def _rows(sector: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield type, first sector and number of sectors of the four entries of a partition table."""
    if sector[510:512] != b"\x55\xaa":
        return
    for at in range(446, 510, 16):
        _, kind, start, count = _MBR_ROW.unpack_from(sector, at)
        yield kind, start, count


def _logical(read: Read, base: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, offset and length of each logical partition in an extended partition.

    `base`: the extended partition's first sector; `size`: the disk's size. Offset, length and size
    are in bytes. Stops if the tables form a cycle.
    """
    table = base
    for number in range(5, 5 + _MOST_LOGICAL):
        if (table + 1) * _SECTOR > size:
            return
        rows = list(_rows(read(table * _SECTOR, _SECTOR)))
        if len(rows) < 2:
            return
        (kind, start, count), (more, step, _) = rows[:2]
        if kind:
            yield number, (table + start) * _SECTOR, count * _SECTOR
        if more not in _EXTENDED:
            return
        table = base + step


def _gpt(read: Read, sector: int, size: int) -> Iterator[tuple[int, int, int]]:
    head = read(sector, 92)
    at, count, each = struct.unpack_from("<QII", head, 72)
    count = min(count, _MOST_ENTRIES)
    if not 128 <= each <= 4096 or at * sector + count * each > size:
        return
    table = read(at * sector, count * each)
    for number in range(count):
        entry = table[number * each : (number + 1) * each]
        first, last = struct.unpack_from("<QQ", entry, 32)
        if any(entry[:16]) and last >= first:
            yield number + 1, first * sector, (last - first + 1) * sector
