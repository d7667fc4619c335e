"""A store and memory that are only dictionaries and arrays, for snapshots of one region."""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from vmckpt.errors import NotInStore
from vmckpt.store.format.chunk_map import UNIT, Extent, Kind, Map, What
from vmckpt.store.ingest import PRINT, Counts, Ingest, Past, Table
from vmckpt.units import Bytes


class Store:
    """Chunks in memory; a digest is a number."""

    def __init__(self) -> None:
        self.chunks: dict[bytes, bytes] = {}
        self.ids: dict[bytes, bytes] = {}
        self.wrote = 0

    def add(self, plain: bytes | memoryview) -> "Future[bytes]":
        data = bytes(plain)
        digest = self.ids.setdefault(data, len(self.ids).to_bytes(32, "big"))
        if digest not in self.chunks:
            self.wrote += len(data)
        self.chunks[digest] = data
        done: Future[bytes] = Future()
        done.set_result(digest)
        return done

    def has(self, digest: bytes) -> bool:
        return digest in self.chunks

    def read(self, digest: bytes) -> bytes:
        if digest not in self.chunks:
            raise NotInStore("lost")
        return self.chunks[digest]

    def expect(self, digests: list[bytes]) -> None:
        assert all(self.has(digest) for digest in digests)


@dataclass
class Memory:
    """A region in memory. `told`: units that are said to be the same; `unread`: units that are, and
    cannot be read."""

    kind: Kind
    data: np.ndarray
    told: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    name: str = "pc.ram"
    reads: list[int] = field(default_factory=list)

    @property
    def size(self) -> Bytes:
        return Bytes(self.data.size)

    @property
    def rows(self) -> np.ndarray:
        return self.data.reshape(-1, UNIT[self.kind])

    def extents(self) -> Iterable[Extent]:
        for at, row in enumerate(self.rows):
            what = What.DATA if row.any() or at % 3 else What.ZEROS
            what = What.SAME if at in self.told else what
            yield Extent(at, 1, What.UNREAD if at in self.unread else what)

    def read(self, start: int, count: int) -> memoryview:
        self.reads += range(start, start + count)
        assert not self.unread & set(range(start, start + count))
        return memoryview(self.rows[start : start + count].tobytes())


@dataclass
class Made:
    map: Map
    prints: np.ndarray
    chunks: Sequence[bytes]
    counts: Counts


def ingested(
    store: Store, region: Memory, past: Made | None = None, by_prints: bool = True
) -> Made:
    table = Table(past.chunks if past else ())
    ingest = Ingest(store, table, stop=threading.Event())
    prints = np.zeros(len(region.rows), dtype=f"V{PRINT}")
    before = None
    if past is not None:
        before = Past(map=past.map, prints=past.prints if by_prints else None)
    map_ = ingest.region(region, before, prints if by_prints else None)
    return Made(map_, prints, list(table.digests()), ingest.counts)


def ram(pages: int) -> Memory:
    return Memory(Kind.RAM, np.zeros(pages * 4096, dtype=np.uint8))


def scribble(region: Memory, where: Iterable[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    for at in where:
        region.rows[at] = random.integers(0, 256, UNIT[region.kind], dtype=np.uint8)
