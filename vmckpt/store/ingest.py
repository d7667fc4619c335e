"""Store a guest's regions as chunks and maps.

Units of zeros need no chunk. Units that are unchanged since the parent snapshot refer to the
parent's chunks. Only the remaining units are written.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import blake3
import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import Cancelled, StoreError
from vmckpt.store.format.chunk_map import (
    GROUP,
    MOST_CHUNKS,
    SLOTS,
    UNIT,
    ZERO,
    Digests,
    Extent,
    Map,
    Region,
    What,
    blocks,
    nothing,
    slots_of,
)
from vmckpt.store.format.sealing import DIGEST
from vmckpt.units import Bytes

Prints = NDArray[np.void]
Flags = NDArray[np.bool_]
PRINT = 16
"""Bytes of a unit's BLAKE3 that are kept to detect changes. With 2^32 units, the probability that
any two hashes collide is about 2^-64."""
_WINDOW = 16 << 20
"""Bytes per read: a multiple of the group sizes for memory and for disks."""
_UNSEEN, _LOST = -1, -2
_SELDOM = 64
"""The pages of mapped files are released after this many windows: after every 1 GiB read."""


class Sink(Protocol):
    """Where chunks are stored; implemented by `pack_writer.Writer`."""

    def add(self, plain: bytes | memoryview) -> "Future[bytes]":
        """Store a chunk. Returns a future for its digest."""

    def has(self, digest: bytes) -> bool:
        """Return whether a chunk is stored or being stored, and will be kept for this writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A region in the parent snapshot."""

    map: Map
    prints: Prints | None
    """A hash of each unit; None if the region itself reports which units are unchanged."""


@dataclass(slots=True)
class Counts:
    """Byte counts, summed over all regions of a snapshot."""

    read: int = 0
    zero: int = 0
    same: int = 0
    new: int = 0
    """Number of bytes passed to the store; the store may already contain some of them."""


class Table:
    """The chunk table of a snapshot that is being created."""

    def __init__(self, past: Sequence[bytes] = ()) -> None:
        """Start an empty table. `past` is the chunk table of the parent snapshot."""
        self.past = past
        self._known = bytearray()
        """The first digests, by index, up to the first digest that is not known yet."""
        self._coming: deque[Future[bytes] | bytes] = deque()
        """The chunks after `_known`. A future takes thirty times the memory of a digest."""
        self._taken = np.full(len(past), _UNSEEN, dtype=np.int64)

    def new(self, chunk: "Future[bytes] | bytes") -> int:
        """Add a chunk, given as its digest or a future for the digest. Returns its index.

        Raises StoreError if the table is full. If an earlier chunk failed, raises its error.
        """
        index = len(self._known) // DIGEST + len(self._coming)
        if index >= MOST_CHUNKS:
            raise StoreError(f"the snapshot is too large: it needs more than {MOST_CHUNKS} chunks")
        self._coming.append(chunk)
        self._settle(wait=False)
        return index

    def _settle(self, *, wait: bool) -> None:
        """Replace finished futures by their digests. With `wait`, wait for all futures."""
        while self._coming:
            chunk = self._coming[0]
            if isinstance(chunk, Future):
                if not wait and not chunk.done():
                    return
                chunk = chunk.result()
            self._known += chunk
            self._coming.popleft()

    def kept(self, old: int, sink: Sink) -> int | None:
        """Return the new index of a chunk of the parent snapshot; None if the store lost the chunk.

        `old` is the chunk's index in the parent's chunk table.
        """
        if self._taken[old] == _UNSEEN:
            digest = self.past[old]
            self._taken[old] = self.new(digest) if sink.has(digest) else _LOST
        index = int(self._taken[old])
        return None if index == _LOST else index

    def digests(self) -> Digests:
        """Return the digests of all chunks, by index. If a chunk failed, raises its error."""
        self._settle(wait=True)
        return Digests(self._known)


class Ingest:
    """Stores the regions of a snapshot, one at a time."""

    def __init__(
        self,
        sink: Sink,
        table: Table,
        *,
        stop: threading.Event,
        progress: Callable[[Counts], None] = lambda _: None,
    ) -> None:
        """Store to `sink` and `table`. Setting `stop` raises Cancelled before the next window."""
        self.counts = Counts()
        self._sink, self._table = sink, table
        self._stop, self._progress = stop, progress

    def region(
        self, region: Region, past: Past | None, prints: Prints | None = None,
        map_: Map | None = None,
    ) -> Map:  # fmt: skip
        """Store a region. Returns its map.

        `past` is ignored if the region's size has changed. `prints` is an array of zeros, one entry
        per unit, which is filled in for the next snapshot; None: not needed. `map_` is an array for
        the map, initialised like the result of `nothing`; None: a new array. Raises StoreError,
        Cancelled, and any error from reading the region.
        """
        if map_ is None:
            map_ = nothing(region.kind, region.size)
        return _One(self, region, past, prints, map_).run()

    def add(self, plain: bytes | memoryview) -> int:
        """Store a chunk. Returns its index in the chunk table."""
        self.counts.new += len(plain)
        return self._table.new(self._sink.add(plain))

    def kept(self, old: int) -> int | None:
        """See Table.kept."""
        return self._table.kept(old, self._sink)

    def told(self, read: int) -> None:
        """Count a window of `read` bytes and report progress. Raises Cancelled."""
        self.counts.read += read
        self._progress(self.counts)
        if self._stop.is_set():
            raise Cancelled("stopped while storing the guest's state")


class _Window:
    """Groups of units that are processed together, one row per unit."""

    def __init__(self, region: Region, start: int, what: NDArray[np.uint8]) -> None:
        self.start = start
        self.what = what
        self.unread: Flags = what == _CODES[What.UNREAD]
        self.rows = np.zeros((0, UNIT[region.kind] // 8), dtype=np.uint64)
        """Empty until the first units have been read."""
        self.read: Flags = np.zeros(len(what), dtype=bool)
        self._region = region

    def fetch(self, these: Flags) -> None:
        """Read the units in `these` that have not been read yet."""
        words = self.rows.shape[1]
        for first, count in _runs(these & ~self.read):
            data = np.frombuffer(self._region.read(self.start + first, count), dtype=np.uint64)
            if count == len(self.what):
                self.rows = data.reshape(count, words)  # no copy in the common case
                continue
            if not len(self.rows):
                self.rows = np.zeros((len(self.what), words), dtype=np.uint64)
            self.rows[first : first + count] = data.reshape(count, words)
        self.read |= these


class _One:
    """One region that is being stored."""

    def __init__(
        self, ingest: Ingest, region: Region, past: Past | None, prints: Prints | None, map_: Map
    ) -> None:
        self._ingest, self._region = ingest, region
        self._unit, self._group = UNIT[region.kind], GROUP[region.kind]
        self._map = map_
        self._past = past if past is not None and len(past.map) == len(self._map) else None
        self._prints = prints
        self._pool: list[int] = []
        self._pooled = bytearray()

    def _again(self, past: Past, start: int, same: Flags) -> Flags:
        """Map unchanged units to the parent's chunks. Returns which units the store has lost."""
        part = past.map[start : start + len(same)]
        there = np.flatnonzero(same & (part != ZERO))
        lost = np.zeros(len(same), dtype=bool)
        if len(there):
            chunks, slots = slots_of(part[there])
            olds, places = np.unique(chunks, return_inverse=True)
            kept = [self._ingest.kept(int(old)) for old in olds]
            index = np.array([_NONE if one is None else one for one in kept], dtype=np.uint32)
            found = index[places]
            self._map[start + there] = found * np.uint32(SLOTS) + slots
            lost[there] = found == _NONE
        if self._prints is not None and past.prints is not None:
            self._prints[start : start + len(same)][same] = past.prints[start:][: len(same)][same]
        self._ingest.counts.same += int((same & ~lost).sum()) * self._unit
        return lost

    def run(self) -> Map:
        for number, window in enumerate(self._windows(self._region.extents())):
            self._take(window)
            self._ingest.told(int(window.read.sum()) * self._unit)
            if number % _SELDOM == 0:
                self._let_go()
        self._let_go()
        self._flush()
        zeros = sum(int((part == ZERO).sum()) for part in blocks(self._map))
        self._ingest.counts.zero += zeros * self._unit
        return self._map

    def _let_go(self) -> None:
        """Release the memory of mapped maps and prints: 40 bytes for each page of the guest."""
        mapped: list[Prints | Map | None] = [self._prints, self._map]
        if self._past is not None:
            mapped += [self._past.prints, self._past.map]
        for one in mapped:
            base: object = None if one is None else one.base
            if isinstance(base, mmap.mmap):
                base.madvise(mmap.MADV_DONTNEED)

    def _windows(self, extents: Iterable[Extent]) -> Iterator[_Window]:
        """Yield windows in order, with what is known about each unit. Skips windows of zeros."""
        most, end = _WINDOW // self._unit, len(self._map)
        start, what = 0, np.zeros(min(most, end), dtype=np.uint8)
        for extent in extents:
            low, high = extent.start, min(extent.start + extent.count, end)
            while low < high:
                if low >= start + most:
                    if what.any():
                        yield _Window(self._region, start, what)
                    start = low - low % most
                    what = np.zeros(min(most, end - start), dtype=np.uint8)
                last = min(high, start + most)
                what[low - start : last - start] = _CODES[extent.what]
                low = last
        if what.any():
            yield _Window(self._region, start, what)

    def _take(self, window: _Window) -> None:
        """Map unchanged units to the parent's chunks. Read and store the other units.

        Raises StoreError, also if the store has lost unchanged units that cannot be read again.
        """
        start, past = window.start, self._past
        same: Flags = window.what >= _CODES[What.SAME]
        lost = same if past is None else self._again(past, start, same)
        if (lost & window.unread).any():
            raise StoreError(
                "the store lacks chunks of the previous snapshot's memory",
                hint="take the snapshot again: it then reads all memory",
            )
        data: Flags = (window.what == _CODES[What.DATA]) | lost
        if not data.any():
            return
        window.fetch(data)
        filled = data.copy()
        # Rows that were not read are not touched: in a large guest they are nearly all.
        filled[data] = (window.rows if data.all() else window.rows[data]).any(axis=1)
        changed = filled
        if self._prints is not None:
            part = self._prints[start : start + len(data)]
            part[data] = _printed(window.rows, filled)[data]
            if past is not None and past.prints is not None:
                known: Flags = filled & (past.map[start : start + len(data)] != ZERO)
                known &= np.asarray(part == past.prints[start : start + len(data)])
                changed = filled & ~(known & ~self._again(past, start, known))
        there: Flags = filled | (~data & (self._map[start : start + len(data)] != ZERO))
        for group in np.unique(np.flatnonzero(changed) // self._group).tolist():
            first = group * self._group
            self._store(window, slice(first, first + self._group), there, changed)

    def _store(self, window: _Window, group: slice, there: Flags, changed: Flags) -> None:
        """Store a group's changed units, or the complete group if at least half of it changed.

        The complete group is stored only if all its units can be read.
        """
        new = np.flatnonzero(changed[group]) + group.start
        whole = np.flatnonzero(there[group]) + group.start
        if 2 * len(new) >= len(whole) and not window.unread[whole].any():
            these = np.zeros(len(there), dtype=bool)
            these[whole] = True
            window.fetch(these)
            index = self._ingest.add(_gathered(window.rows, whole))
            slots = np.arange(len(whole), dtype=np.uint32)
            self._map[window.start + whole] = index * SLOTS + slots
            return
        for at in new.tolist():
            self._pool.append(window.start + at)
            self._pooled += window.rows[at].tobytes()
            if len(self._pool) == self._group:
                self._flush()

    def _flush(self) -> None:
        """Store the pooled units, which come from different groups, as one chunk."""
        if self._pool:
            index = self._ingest.add(bytes(self._pooled))
            slots = np.arange(len(self._pool), dtype=np.uint32)
            self._map[np.array(self._pool)] = index * SLOTS + slots
            self._pool, self._pooled = [], bytearray()


_NONE = np.uint32(0xFFFFFFFF)
_CODES = {What.ZEROS: 0, What.DATA: 1, What.SAME: 2, What.UNREAD: 3}


def _printed(rows: NDArray[np.uint64], these: Flags) -> Prints:
    """Return the prints of the units in `these`, and zeros for all other units."""
    made = np.zeros(len(rows), dtype=f"V{PRINT}")
    raw, unit = rows.data.cast("B"), rows.shape[1] * 8
    for at in np.flatnonzero(these).tolist():
        made[at] = np.void(blake3.blake3(raw[at * unit : (at + 1) * unit]).digest(PRINT))
    return made


def _gathered(rows: NDArray[np.uint64], there: NDArray[np.intp]) -> bytes:
    """Concatenate units. Returns a copy, because the rows are only valid until the next read."""
    first, last = int(there[0]), int(there[-1])
    if last - first + 1 == len(there):
        return rows[first : last + 1].tobytes()
    return rows[there].tobytes()


def _runs(mask: Flags) -> list[tuple[int, int]]:
    """Return the start and the length of each run of true values in a mask."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def stored(sink: Sink, table: Table, blob: bytes, size: Bytes = Bytes(1 << 20)) -> list[int]:
    """Store a blob (device state, firmware) as chunks of `size` bytes. Returns their indexes."""
    return [table.new(sink.add(blob[at : at + size])) for at in range(0, len(blob), size)]
