"""Regions into chunks and back: whatever changes between snapshots, each one reads back whole."""

import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.errors import Cancelled, NotInStore, StoreDamaged, StoreError
from vmckpt.store.assemble import Assembly
from vmckpt.store.format.chunk_map import GROUP, UNIT, ZERO, Extent, Kind, Map, What, units
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
    """A region in memory. `told`: units that are said to be the same."""

    kind: Kind
    data: np.ndarray
    told: set[int] = field(default_factory=set)
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
            yield Extent(at, 1, What.SAME if at in self.told else what)

    def read(self, start: int, count: int) -> memoryview:
        self.reads += range(start, start + count)
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


def read_back(store: Store, region: Memory, made: Made) -> np.ndarray:
    found = np.full_like(region.rows, 7)
    for piece in Assembly(region.kind, region.size, made.map, made.chunks, store).pieces():
        part = found[piece.start : piece.start + piece.count]
        part[:] = (
            0 if piece.data is None else np.frombuffer(piece.data, np.uint8).reshape(part.shape)
        )
    return found


def ram(pages: int) -> Memory:
    return Memory(Kind.RAM, np.zeros(pages * 4096, dtype=np.uint8))


def scribble(region: Memory, where: Iterable[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    for at in where:
        region.rows[at] = random.integers(0, 256, UNIT[region.kind], dtype=np.uint8)


steps = st.lists(
    st.tuples(
        st.sets(st.integers(0, 299), max_size=80),  # written
        st.sets(st.integers(0, 299), max_size=20),  # zeroed
        st.sets(st.integers(0, 20), max_size=3),  # chunks that the store loses
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40)
@given(steps, st.booleans(), st.sampled_from(Kind))
def test_every_snapshot_of_a_line_reads_back(
    story: list[tuple[set[int], set[int], set[int]]], by_prints: bool, kind: Kind
) -> None:
    store, past = Store(), None
    pages = 300 if kind is Kind.RAM else 40
    region = Memory(kind, np.zeros(pages * UNIT[kind], dtype=np.uint8))
    for number, (some, others, lost) in enumerate(story):
        written, zeroed = ({at % pages for at in one} for one in (some, others))
        scribble(region, written, number)
        region.rows[sorted(zeroed)] = 0
        if past is not None:
            for index in lost & set(range(len(past.chunks))):
                store.chunks.pop(past.chunks[index], None)
        region.told = set() if by_prints or past is None else set(range(pages)) - written - zeroed
        past = ingested(store, region, past, by_prints)
        assert (read_back(store, region, past) == region.rows).all()


def test_zeros_cost_nothing() -> None:
    store, region = Store(), ram(1000)
    made = ingested(store, region)
    assert (made.map == ZERO).all()
    assert (store.wrote, made.chunks) == (0, [])
    assert made.counts.zero == region.size


def test_one_changed_page_is_one_page_written() -> None:
    store, region = Store(), ram(640)
    scribble(region, range(640), 1)
    first = ingested(store, region)
    wrote = store.wrote
    scribble(region, [100, 501], 2)
    second = ingested(store, region, first)
    assert store.wrote - wrote == 2 * 4096
    assert second.counts.same == 638 * 4096
    assert (read_back(store, region, second) == region.rows).all()


def test_a_group_that_changed_for_the_greater_part_goes_on_the_grid() -> None:
    store, region = Store(), ram(128)
    scribble(region, range(128), 1)
    first = ingested(store, region)
    scribble(region, range(40), 2)
    ingested(store, region, first)
    without = ingested(store, region)  # the line is lost: the grid finds the same chunks
    assert without.counts.new == region.size
    assert len(store.chunks) == 3


def test_what_the_region_calls_the_same_is_not_read() -> None:
    store, region = Store(), ram(640)
    scribble(region, range(640), 1)
    first = ingested(store, region)
    scribble(region, [5], 2)
    region.told, region.reads = set(range(640)) - {5}, []
    ingested(store, region, first)
    assert region.reads == [5]


def test_an_odd_disk_ends_with_zeros() -> None:
    size = GROUP[Kind.DISK] * UNIT[Kind.DISK] + 512
    assert units(Kind.DISK, size) == GROUP[Kind.DISK] + 1


def test_stopped_between_two_windows() -> None:
    stop = threading.Event()
    stop.set()
    region = ram(64)
    scribble(region, range(64), 1)
    with pytest.raises(Cancelled):
        Ingest(Store(), Table(), stop=stop).region(region, None)


def test_a_map_that_does_not_fit_is_refused() -> None:
    store = Store()
    with pytest.raises(StoreDamaged, match="names a chunk"):
        Assembly(Kind.RAM, 4096, np.array([64], dtype=np.uint32), [b"x"], store)
    with pytest.raises(StoreDamaged, match="as long as"):
        Assembly(Kind.RAM, 8192, np.array([0], dtype=np.uint32), [b"x"], store)
    store.chunks[b"x"] = bytes(4096)
    short = Assembly(Kind.RAM, 4096, np.array([1], dtype=np.uint32), [b"x"], store)
    with pytest.raises(StoreDamaged, match="not what its snapshot says"):
        short.read(0, 1)


def test_digests_take_the_place_of_the_futures_that_tell_them() -> None:
    table = Table()
    coming: list[Future[bytes]] = [Future() for _ in range(3)]
    kept = [weakref.ref(one) for one in coming]
    for number, one in enumerate(coming):
        assert table.new(one) == number
    for number in (1, 0, 2):
        coming[number].set_result(bytes([number]) * 32)
    assert table.new(b"k" * 32) == 3
    one = None  # type: ignore[assignment]
    coming.clear()

    assert [ref() for ref in kept] == [None, None, None]
    assert list(table.digests()) == [bytes([n]) * 32 for n in range(3)] + [b"k" * 32]


def test_a_chunk_that_was_not_stored_is_told_by_the_table() -> None:
    table = Table()
    failed: Future[bytes] = Future()
    table.new(failed)
    failed.set_exception(StoreError("no room"))

    with pytest.raises(StoreError, match="no room"):
        table.new(b"k" * 32)
    with pytest.raises(StoreError, match="no room"):
        table.digests()


@pytest.mark.parametrize("kind", Kind)
def test_no_more_than_a_window_is_in_memory_at_once(kind: Kind) -> None:
    most = 16 << 20
    region = Memory(kind, np.ones(2 * most + 4 * UNIT[kind], dtype=np.uint8))
    asked: list[int] = []

    def read(start: int, count: int) -> memoryview:
        asked.append(count * UNIT[kind])
        return memoryview(region.rows[start : start + count].tobytes())

    region.read = read  # type: ignore[method-assign]
    store = Store()
    made = ingested(store, region)
    pieces = Assembly(kind, region.size, made.map, made.chunks, store).pieces()

    assert max(asked) <= most
    assert max(len(piece.data or b"") for piece in pieces) <= most


def test_units_that_lie_in_a_chunk_are_handed_out_as_they_lie_there() -> None:
    store, region = Store(), ram(256)
    scribble(region, [*range(100), *range(110, 256)], 1)
    made = ingested(store, region)
    whole = [p.data for p in Assembly(Kind.RAM, region.size, made.map, made.chunks, store).pieces()]
    assert [None if one is None else len(one) // 4096 for one in whole] == [
        64,
        36,
        None,
        18,
        64,
        64,
    ]
    held = {id(one) for one in store.chunks.values()}
    assert all(id(one.obj) in held for one in whole if one is not None)


class Ahead(Store):
    """Remembers what it was told to expect."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[bytes] = []

    def expect(self, digests: list[bytes]) -> None:
        self.expected += digests


def test_who_reads_on_is_expected_and_who_jumps_is_not() -> None:
    store, region = Ahead(), ram(4 * 4096)
    scribble(region, range(0, 4 * 4096, 512), 1)
    made = ingested(store, region)
    disk = Assembly(Kind.RAM, region.size, made.map, made.chunks, store)
    for at in (0, 512, 3 * 4096):
        assert disk.read(at, 1) == region.rows[at].tobytes()
    assert store.expected == []

    disk.read(4096, 1)
    assert len(store.expected) == 4096 // 512
    disk.read(4096 + 512, 8)
    assert len(store.expected) == 4096 // 512
