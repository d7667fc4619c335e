"""Regions of a snapshot, their units, and the map from units to chunks, as numbers and as bytes.

A region is one RAM block or one disk, cut into units of fixed size; a chunk holds up to `SLOTS`
units one after the other. A map has one number per unit: `ZERO`, or the chunk's index in the
manifest's chunk table times `SLOTS` plus the unit's place in the chunk.

As bytes, a map is cut into blocks of 2^20 units. A block is a length (4 bytes, little endian) and a
zstd frame with one bit per unit, the first unit's highest: 0 for zeros; then, for each other unit,
its number less the one before (4 bytes, little endian, modulo 2^32; the first of a block less 0).
Units of one chunk follow each other, so nearly all of these differences are 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, overload

import numpy as np
import zstandard
from numpy.typing import NDArray

from vmckpt.errors import StoreDamaged
from vmckpt.store.format.sealing import DIGEST
from vmckpt.units import Bytes

Map = NDArray[np.uint32]
SLOTS = 64
ZERO = np.uint32(0xFFFFFFFF)
MOST_CHUNKS = int(ZERO) // SLOTS
"""2^26 - 1 chunks: 16 TiB of memory or 64 TiB of disk in one snapshot."""
BLOCK = 1 << 20
"""Units; see `blocks`."""


class Kind(StrEnum):
    """What a region is."""

    RAM = "ram"
    DISK = "disk"


UNIT = {Kind.RAM: Bytes(4096), Kind.DISK: Bytes(65536)}
GROUP = {Kind.RAM: 64, Kind.DISK: 16}
"""Units at fixed places that make one chunk: 256 KiB of memory, 1 MiB of disk."""


class What(StrEnum):
    """What is known of some units before they are read."""

    ZEROS = "zeros"
    DATA = "data"
    SAME = "same"
    """As in the snapshot that was named as the last one."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Some units in a row."""

    start: int
    count: int
    what: What


class Region(Protocol):
    """One RAM block or disk of a guest that stands still, or seems to."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def size(self) -> Bytes: ...

    def extents(self) -> Iterable[Extent]:
        """All of its units, in order. SAME is only said of units that did not change."""

    def read(self, start: int, count: int) -> memoryview:
        """The bytes of some units, whatever was said of them; the last unit is filled up with
        zeros. Good until the next call."""


def units(kind: Kind, size: int) -> int:
    """How many units a region has."""
    return -(-size // UNIT[kind])


def nothing(kind: Kind, size: int) -> Map:
    """The map of a region that is all zeros."""
    return np.full(units(kind, size), ZERO, dtype=np.uint32)


def blocks(map_: Map) -> Iterator[Map]:
    """A map in parts: what is worked out of a whole one may take several times its memory."""
    return (map_[at : at + BLOCK] for at in range(0, len(map_), BLOCK))


def slots_of(map_: Map) -> tuple[Map, Map]:
    """Chunk index and slot of each unit; meaningless where it is ZERO."""
    return map_ // np.uint32(SLOTS), map_ % np.uint32(SLOTS)


MOST_UNITS = 1 << 28
"""All regions of a snapshot together: 1 TiB of memory, or 16 TiB of disks. What no snapshot has is
not given memory when a manifest claims it."""
_BLOCK = 1 << 20
_LENGTH = 4
_DELTA = np.dtype("<u4")


class Digests(Sequence[bytes]):
    """Digests or names in a row; a list of them would take three times the memory."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes | bytearray | memoryview = b"") -> None:
        """Raises ValueError if the bytes are no whole number of them."""
        if len(raw) % DIGEST:
            raise ValueError(f"{len(raw)} bytes are no digests")
        self.raw = bytes(raw)

    @classmethod
    def of(cls, digests: "Sequence[bytes]") -> "Digests":
        """Those of a sequence."""
        return digests if isinstance(digests, cls) else cls(b"".join(digests))

    def __len__(self) -> int:
        return len(self.raw) // DIGEST

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = index % len(self) * DIGEST
        return self.raw[at : at + DIGEST]

    def __iter__(self) -> Iterator[bytes]:
        return (self.raw[at : at + DIGEST] for at in range(0, len(self.raw), DIGEST))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and self.raw == other.raw

    def __hash__(self) -> int:
        return hash(self.raw)

    def array(self) -> NDArray[np.void]:
        """The same as numpy has them, without a copy."""
        return np.frombuffer(self.raw, dtype=f"V{DIGEST}")


def ordered(names: Iterable[bytes]) -> Digests:
    """Names in ascending order, each once."""
    raw = bytearray()
    for name in names:
        raw += name
    # numpy leaves out zeros at the end of what it hands out, and not of what it compares or keeps.
    return Digests(np.unique(np.frombuffer(raw, dtype=f"S{DIGEST}")).tobytes())


def ascending(names: Digests) -> bool:
    """Whether names are in ascending order, each once."""
    if len(names) < 2:
        return True
    # A name as four numbers, the most significant first; equal ones decide nothing.
    words = np.frombuffer(names.raw, dtype=">u8").reshape(-1, DIGEST // 8)
    lower, higher = words[:-1], words[1:]
    less = np.zeros(len(lower), dtype=np.bool_)
    same = np.ones(len(lower), dtype=np.bool_)
    for word in range(words.shape[1]):
        less |= same & (lower[:, word] < higher[:, word])
        same &= lower[:, word] == higher[:, word]
    return bool(less.all())


def pack(map_: Map) -> bytes:
    """A map as bytes."""
    zstd = zstandard.ZstdCompressor(level=3)
    parts = []
    for start in range(0, len(map_), _BLOCK):
        frame = zstd.compress(_block(map_[start : start + _BLOCK]))
        parts += [len(frame).to_bytes(_LENGTH, "little"), frame]
    return b"".join(parts)


def _block(part: Map) -> bytes:
    filled = part != ZERO
    deltas = np.diff(part[filled], prepend=np.uint32(0))
    bits: bytes = np.packbits(filled).tobytes()
    numbers: bytes = deltas.astype(_DELTA, copy=False).tobytes()
    return bits + numbers


def unpack(data: memoryview, count: int, chunks: int) -> Map:
    """The map of `count` units over a table of `chunks`. Raises StoreDamaged."""
    if not 0 <= count <= MOST_UNITS:
        raise StoreDamaged(f"a map of {count} units")
    zstd = zstandard.ZstdDecompressor()
    # Not touched, and so no memory, before there are bytes for it.
    map_ = np.empty(count, dtype=np.uint32)
    at = 0
    for start in range(0, count, _BLOCK):
        part = map_[start : start + _BLOCK]
        end = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
        if end > len(data):
            raise StoreDamaged("a map is cut off")
        _fill(part, _plain(zstd, data[at + _LENGTH : end], len(part)), chunks)
        at = end
    if at != len(data):
        raise StoreDamaged("a map has something behind it")
    return map_


def _plain(zstd: zstandard.ZstdDecompressor, frame: memoryview, count: int) -> bytes:
    most = -(-count // 8) + count * _DELTA.itemsize
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= most:
            raise StoreDamaged("a map claims to be longer than its region")
        plain: bytes = zstd.decompress(frame, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise StoreDamaged("a map cannot be decompressed") from exc
    return plain


def _fill(part: Map, plain: bytes, chunks: int) -> None:
    bits = -(-len(part) // 8)
    flags = np.frombuffer(plain[:bits], dtype=np.uint8)
    if len(flags) != bits:
        raise StoreDamaged("a map is cut off")
    filled = np.unpackbits(flags).astype(np.bool_)
    there = int(filled.sum())
    if filled[len(part) :].any() or len(plain) != bits + there * _DELTA.itemsize:
        raise StoreDamaged("a map does not fit its region")
    deltas = np.frombuffer(plain, dtype=_DELTA, offset=bits)
    numbers = np.cumsum(deltas, dtype=np.uint32)
    # ZERO is no number of a unit that is there, and every chunk must be in the table.
    if there and int(numbers.max()) >= min(chunks * SLOTS, int(ZERO)):
        raise StoreDamaged("a map names a chunk that the snapshot does not have")
    part.fill(ZERO)
    part[filled[: len(part)]] = numbers
