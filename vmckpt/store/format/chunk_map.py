"""Regions of a snapshot, their units, and the map from units to chunks, in memory and encoded.

A region is one RAM block or one disk, divided into units of fixed size. A chunk contains up to
`SLOTS` units in sequence. A map has one number per unit. The number is `ZERO`, or the chunk's index
in the manifest's chunk table times `SLOTS`, plus the unit's position in the chunk.

For encoding, a map is divided into blocks of 2^20 units. A block consists of a length (4 bytes,
little endian) and a zstd frame. The frame first contains one bit per unit, with the first unit in
the highest bit; 0 stands for a unit of zeros. For each other unit, the frame then contains the
difference between the unit's number and the previous number (4 bytes, little endian, modulo 2^32).
At the beginning of a block the previous number is 0. Most units directly follow the previous unit
in the same chunk, so nearly all differences are 1.
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
"""Maximum number of chunks, 2^26 - 1: 16 TiB of memory or 64 TiB of disk in one snapshot."""
BLOCK = 1 << 20
"""Units per block of an encoded map; see `blocks`."""


class Kind(StrEnum):
    """The type of a region."""

    RAM = "ram"
    DISK = "disk"


UNIT = {Kind.RAM: Bytes(4096), Kind.DISK: Bytes(65536)}
GROUP = {Kind.RAM: 64, Kind.DISK: 16}
"""Number of units in an aligned group, which becomes one chunk: 256 KiB of memory or 1 MiB of
disk."""


class What(StrEnum):
    """What is known about units before they are read."""

    ZEROS = "zeros"
    DATA = "data"
    SAME = "same"
    """Unchanged since the parent snapshot."""
    UNREAD = "unread"
    """Unchanged since the parent snapshot; the content is not available."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of consecutive units."""

    start: int
    count: int
    what: What


class Region(Protocol):
    """A RAM block or disk of a guest, as it was at one instant."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def size(self) -> Bytes: ...

    def extents(self) -> Iterable[Extent]:
        """Return extents that cover all units, in order."""

    def read(self, start: int, count: int) -> memoryview:
        """Return the content of `count` units, of any type of extent except UNREAD.

        The last unit of the region is padded with zeros. The view is valid until the next call.
        """


def units(kind: Kind, size: int) -> int:
    """Return the number of units in a region. `size` is in bytes."""
    return -(-size // UNIT[kind])


def nothing(kind: Kind, size: int) -> Map:
    """Return the map of a region that contains only zeros. `size` is in bytes."""
    return np.full(units(kind, size), ZERO, dtype=np.uint32)


def blocks(map_: Map) -> Iterator[Map]:
    """Split a map into blocks.

    Intermediate results for a complete map may take several times the memory of the map.
    """
    return (map_[at : at + BLOCK] for at in range(0, len(map_), BLOCK))


def slots_of(map_: Map) -> tuple[Map, Map]:
    """Return the chunk index and the slot of each unit. Where the map is ZERO, ignore both."""
    return map_ // np.uint32(SLOTS), map_ % np.uint32(SLOTS)


MOST_UNITS = 1 << 28
"""Maximum total number of units in a snapshot: 1 TiB of memory, or 16 TiB of disks. The limit
prevents an invalid manifest from making the reader allocate too much memory."""
_BLOCK = 1 << 20
_LENGTH = 4
_DELTA = np.dtype("<u4")


class Digests(Sequence[bytes]):
    """An array of digests or names. A list of bytes objects would take three times the memory."""

    __slots__ = ("raw",)

    def __init__(self, raw: bytes | bytearray | memoryview = b"") -> None:
        """Take concatenated digests. Raises ValueError if the length is not a multiple of 32."""
        if len(raw) % DIGEST:
            raise ValueError(f"{len(raw)} bytes: not a multiple of the digest length")
        self.raw = bytes(raw)

    @classmethod
    def of(cls, digests: "Sequence[bytes]") -> "Digests":
        """Convert a sequence of digests."""
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
        """Return the digests as a numpy array, without a copy."""
        return np.frombuffer(self.raw, dtype=f"V{DIGEST}")


def ordered(names: Iterable[bytes]) -> Digests:
    """Sort names in ascending order and remove duplicates."""
    raw = bytearray()
    for name in names:
        raw += name
    # numpy strips trailing zeros from items that it returns. It does not strip them when it
    # compares or stores items.
    return Digests(np.unique(np.frombuffer(raw, dtype=f"S{DIGEST}")).tobytes())


def ascending(names: Digests) -> bool:
    """Return whether names are in strictly ascending order."""
    if len(names) < 2:
        return True
    # A name is compared as four numbers, the most significant number first. If two numbers are
    # equal, the next number decides.
    words = np.frombuffer(names.raw, dtype=">u8").reshape(-1, DIGEST // 8)
    lower, higher = words[:-1], words[1:]
    less = np.zeros(len(lower), dtype=np.bool_)
    same = np.ones(len(lower), dtype=np.bool_)
    for word in range(words.shape[1]):
        less |= same & (lower[:, word] < higher[:, word])
        same &= lower[:, word] == higher[:, word]
    return bool(less.all())


def pack(map_: Map) -> bytes:
    """Encode a map."""
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
    """Decode a map of `count` units over a table of `chunks` chunks. Raises StoreDamaged."""
    if not 0 <= count <= MOST_UNITS:
        raise StoreDamaged(f"a map has {count} units; at most {MOST_UNITS} are allowed")
    zstd = zstandard.ZstdDecompressor()
    # The array takes no memory until it is written to.
    map_ = np.empty(count, dtype=np.uint32)
    at = 0
    for start in range(0, count, _BLOCK):
        part = map_[start : start + _BLOCK]
        end = at + _LENGTH + int.from_bytes(data[at : at + _LENGTH], "little")
        if end > len(data):
            raise StoreDamaged("a map is truncated")
        _fill(part, _plain(zstd, data[at + _LENGTH : end], len(part)), chunks)
        at = end
    if at != len(data):
        raise StoreDamaged("a map has trailing bytes")
    return map_


def _plain(zstd: zstandard.ZstdDecompressor, frame: memoryview, count: int) -> bytes:
    most = -(-count // 8) + count * _DELTA.itemsize
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= most:
            raise StoreDamaged("a map is too long for its region")
        plain: bytes = zstd.decompress(frame, max_output_size=most, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise StoreDamaged("a map cannot be decompressed") from exc
    return plain


def _fill(part: Map, plain: bytes, chunks: int) -> None:
    bits = -(-len(part) // 8)
    flags = np.frombuffer(plain[:bits], dtype=np.uint8)
    if len(flags) != bits:
        raise StoreDamaged("a map is truncated")
    filled = np.unpackbits(flags).astype(np.bool_)
    there = int(filled.sum())
    if filled[len(part) :].any() or len(plain) != bits + there * _DELTA.itemsize:
        raise StoreDamaged("a map does not match its region")
    deltas = np.frombuffer(plain, dtype=_DELTA, offset=bits)
    numbers = np.cumsum(deltas, dtype=np.uint32)
    # The number of a unit with data is never ZERO, and its chunk must be in the table.
    if there and int(numbers.max()) >= min(chunks * SLOTS, int(ZERO)):
        raise StoreDamaged("a map refers to a chunk that the snapshot does not have")
    part.fill(ZERO)
    part[filled[: len(part)]] = numbers
