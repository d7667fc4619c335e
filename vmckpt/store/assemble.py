"""From maps and chunks back to a region's bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import StoreDamaged
from vmckpt.store.regions import GROUP, SLOTS, UNIT, ZERO, Kind, Map, slots_of

_WINDOW = 64


class Source(Protocol):
    """Where chunks come from: `store.Reader`."""

    def read(self, digest: bytes) -> bytes:
        """A chunk. Raises StoreError."""

    def expect(self, digests: "list[bytes]") -> None:
        """These will be read next, in this order: they may be fetched ahead."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some units in a row, zeros or not."""

    start: int
    count: int
    data: memoryview | None
    """None: zeros."""


class Assembly:
    """Reads one region of a snapshot."""

    def __init__(
        self, kind: Kind, size: int, map_: Map, chunks: Sequence[bytes], source: Source
    ) -> None:
        """`chunks`: the manifest's chunk table. Raises StoreDamaged if the map does not fit."""
        self.kind, self.size = kind, size
        self._unit = UNIT[kind]
        self._map, self._source = map_, source
        self._chunks = chunks
        # ZERO is the largest of all numbers: what is not ZERO, and too large, is wrong.
        if ((map_ >= len(chunks) * SLOTS) & (map_ != ZERO)).any():
            raise StoreDamaged("a map names a chunk that the snapshot does not have")
        if len(map_) != -(-size // self._unit):
            raise StoreDamaged("a map is not as long as its region")

    def pieces(self, start: int = 0, count: int | None = None) -> Iterator[Piece]:
        """All units in order, in pieces of at most a window; each piece good until the next."""
        window = _WINDOW * GROUP[self.kind]
        end = len(self._map) if count is None else start + count
        for first in range(start, end, window):
            last = min(first + window, end)
            self._source.expect(self._named(last, min(last + window, end)))
            yield from self._window(first, last)

    def read(self, start: int, count: int) -> bytes:
        """The bytes of some units."""
        buffer = np.zeros((count, self._unit), dtype=np.uint8)
        self._fill(buffer, start)
        return buffer.tobytes()

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Any bytes of the region."""
        first, last = offset // self._unit, -(-(offset + length) // self._unit)
        begin = offset - first * self._unit
        return self.read(first, last - first)[begin : begin + length]

    def zeros(self, offset: int, length: int) -> Iterator[tuple[int, bool]]:
        """For a stretch of bytes what is zeros: lengths one after the other."""
        first, end = offset // self._unit, offset + length
        filled = self._map[first : -(-end // self._unit)] != ZERO
        cuts = [0, *(np.flatnonzero(np.diff(filled)) + 1).tolist(), len(filled)]
        for low, high in pairwise(cuts):
            begin = max(offset, (first + low) * self._unit)
            yield min(end, (first + high) * self._unit) - begin, not filled[low]

    def _named(self, start: int, end: int) -> "list[bytes]":
        part = self._map[start:end]
        names = dict.fromkeys((part[part != ZERO] // np.uint32(SLOTS)).tolist())
        return [self._chunks[index] for index in names]

    def _window(self, first: int, last: int) -> Iterator[Piece]:
        filled = self._map[first:last] != ZERO
        if not filled.any():
            yield Piece(first, last - first, None)
            return
        buffer = np.zeros((last - first, self._unit), dtype=np.uint8)
        self._fill(buffer, first)
        flat = buffer.data.cast("B")
        edges = np.flatnonzero(np.diff(filled)) + 1
        bounds = [0, *edges.tolist(), last - first]
        for low, high in pairwise(bounds):
            data = flat[low * self._unit : high * self._unit] if filled[low] else None
            yield Piece(first + low, high - low, data)

    def _fill(self, buffer: NDArray[np.uint8], start: int) -> None:
        """Put units where they belong; what is zeros stays as it is."""
        part = self._map[start : start + len(buffer)]
        where = np.flatnonzero(part != ZERO)
        if not len(where):
            return
        index, slot = slots_of(part[where])
        order = np.argsort(index, kind="stable")
        cuts = np.flatnonzero(np.diff(index[order])) + 1
        for these in np.split(order, cuts):
            digest = self._chunks[int(index[these[0]])]
            plain = np.frombuffer(self._source.read(digest), dtype=np.uint8)
            if len(plain) % self._unit or int(slot[these].max()) * self._unit >= len(plain):
                raise StoreDamaged(f"chunk {digest.hex()[:16]} is not what its snapshot says")
            units = plain.reshape(-1, self._unit)
            buffer[where[these]] = units[slot[these]]
