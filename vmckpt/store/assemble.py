"""Assemble a region's bytes from its map and chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import StoreDamaged
from vmckpt.store.format.chunk_map import SLOTS, UNIT, ZERO, Kind, Map, slots_of

_WINDOW = 16 << 20
"""Number of bytes announced to the source in one call, and maximum size of a piece."""
_LONG = 16
"""Runs of consecutive units of one chunk are returned without copying if the average run has at
least this many units."""


class Source(Protocol):
    """A source of chunks; implemented by `chunk_reader.Reader`."""

    def read(self, digest: bytes) -> bytes:
        """Return the content of a chunk. Raises StoreError."""

    def expect(self, digests: "list[bytes]") -> None:
        """Announce the chunks that will be read next, in order, so that they can be read ahead."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive units that are either all zeros or all contain data."""

    start: int
    count: int
    data: memoryview | None
    """The content; None: zeros."""


class Assembly:
    """Reads one region of a snapshot."""

    def __init__(
        self, kind: Kind, size: int, map_: Map, chunks: Sequence[bytes], source: Source
    ) -> None:
        """Check the map. Raises StoreDamaged if the map does not fit the region or chunk table.

        `size` is in bytes. `chunks` is the manifest's chunk table.
        """
        self.kind, self.size = kind, size
        self._unit = UNIT[kind]
        self._window = _WINDOW // self._unit
        self._map, self._source = map_, source
        self._chunks = chunks
        self._touched: set[int] = set()
        """Windows from which at least one unit was read."""
        # ZERO is the largest value of its type, so the comparison must exclude it.
        if ((map_ >= len(chunks) * SLOTS) & (map_ != ZERO)).any():
            raise StoreDamaged("a map refers to a chunk that the snapshot does not have")
        if len(map_) != -(-size // self._unit):
            raise StoreDamaged("the length of a map does not match its region")

    def pieces(self, start: int = 0, count: int | None = None) -> Iterator[Piece]:
        """Yield `count` units from `start` on, in pieces of at most one window. Raises StoreError.

        `count`: None: all units after `start`. Each piece is valid until the next piece is
        requested.
        """
        end = len(self._map) if count is None else start + count
        for first in range(start, end, self._window):
            last = min(first + self._window, end)
            if first == start:
                self._source.expect(self._named(first, last))
            self._source.expect(self._named(last, min(last + self._window, end)))
            yield from self._pieces(first, last)

    def read(self, start: int, count: int) -> bytes:
        """Return the content of `count` units. Reads ahead if reads are sequential.

        Raises StoreError.
        """
        for window in range(start // self._window, (start + count - 1) // self._window + 1):
            if window not in self._touched:
                self._touched.add(window)
                if window - 1 in self._touched:
                    first = (window + 1) * self._window
                    self._source.expect(self._named(first, first + self._window))
        buffer = np.zeros((count, self._unit), dtype=np.uint8)
        self._fill(buffer, start)
        return buffer.tobytes()

    def read_bytes(self, offset: int, length: int) -> bytes:
        """Return `length` bytes of the region, starting at `offset`. Raises StoreError."""
        first, last = offset // self._unit, -(-(offset + length) // self._unit)
        begin = offset - first * self._unit
        data = self.read(first, last - first)
        return data if len(data) == length else data[begin : begin + length]

    def zeros(self, offset: int, length: int) -> Iterator[tuple[int, bool]]:
        """Split a range, given in bytes, into runs.

        Yields each run's length, in bytes, and whether the run is all zeros.
        """
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

    def _pieces(self, first: int, last: int) -> Iterator[Piece]:
        part = self._map[first:last]
        filled = part != ZERO
        # There is a break wherever a unit does not directly follow the previous unit in its chunk.
        chunk, follows = part // np.uint32(SLOTS), np.diff(part) == 1
        breaks = np.flatnonzero(~(follows & (chunk[1:] == chunk[:-1]))) + 1
        edges = np.flatnonzero(np.diff(filled)) + 1
        for low, high in pairwise([0, *edges.tolist(), last - first]):
            if not filled[low]:
                yield Piece(first + low, high - low, None)
                continue
            inner = breaks[np.searchsorted(breaks, low + 1) : np.searchsorted(breaks, high)]
            if (len(inner) + 1) * _LONG <= high - low:
                for begin, end in pairwise([low, *inner.tolist(), high]):
                    yield Piece(first + begin, end - begin, self._lying(part[begin], end - begin))
            else:
                buffer = np.zeros((high - low, self._unit), dtype=np.uint8)
                self._fill(buffer, first + low)
                yield Piece(first + low, high - low, buffer.data.cast("B"))

    def _lying(self, number: np.uint32, count: int) -> memoryview:
        """Return consecutive units of one chunk."""
        index, slot = divmod(int(number), SLOTS)
        return self._plain(index, slot + count)[slot * self._unit : (slot + count) * self._unit]

    def _plain(self, index: int, slots: int) -> memoryview:
        """Read a chunk, which must contain at least `slots` units. Raises StoreError."""
        digest = self._chunks[index]
        plain = self._source.read(digest)
        if len(plain) % self._unit or slots * self._unit > len(plain):
            raise StoreDamaged(f"chunk {digest.hex()[:16]} does not match its snapshot's map")
        return memoryview(plain)

    def _fill(self, buffer: NDArray[np.uint8], start: int) -> None:
        """Copy units to their places in `buffer`, which initially contains zeros."""
        part = self._map[start : start + len(buffer)]
        where = np.flatnonzero(part != ZERO)
        if not len(where):
            return
        index, slot = slots_of(part[where])
        order = np.argsort(index, kind="stable")
        cuts = np.flatnonzero(np.diff(index[order])) + 1
        for these in np.split(order, cuts):
            plain = self._plain(int(index[these[0]]), int(slot[these].max()) + 1)
            units = np.frombuffer(plain, dtype=np.uint8).reshape(-1, self._unit)
            buffer[where[these]] = units[slot[these]]
