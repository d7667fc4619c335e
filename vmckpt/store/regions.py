"""What a snapshot holds piece by piece: regions, their units, and the map from units to chunks.

A region is one RAM block or one disk, cut into units of fixed size; a chunk holds up to `SLOTS`
units one after the other. A map has one number per unit: `ZERO`, or the chunk's index in the
manifest's chunk table times `SLOTS` plus the unit's place in the chunk.

Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
