"""Regions into chunks and back: whatever changes between snapshots, each one reads back whole."""

import threading
import weakref
from concurrent.futures import Future

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ingesting import Made, Memory, Store, ingested, ram, scribble
from vmckpt.errors import Cancelled, StoreError
from vmckpt.store.assemble import Assembly
from vmckpt.store.format.chunk_map import GROUP, UNIT, ZERO, Kind, units
from vmckpt.store.ingest import Ingest, Table


def read_back(store: Store, region: Memory, made: Made) -> np.ndarray:
    found = np.full_like(region.rows, 7)
    for piece in Assembly(region.kind, region.size, made.map, made.chunks, store).pieces():
        part = found[piece.start : piece.start + piece.count]
        part[:] = (
            0 if piece.data is None else np.frombuffer(piece.data, np.uint8).reshape(part.shape)
        )
    return found


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


def test_what_cannot_be_read_is_taken_from_the_snapshot_before() -> None:
    store, region = Store(), ram(192)
    scribble(region, range(128), 1)
    first = ingested(store, region)
    written = {*range(40), 100, 130}  # most of the first group, which is not written as a whole
    scribble(region, written, 2)
    region.unread = set(range(192)) - written
    second = ingested(store, region, first)
    assert (read_back(store, region, second) == region.rows).all()
    assert second.counts.new == len(written) * 4096
    for one in first.chunks:
        store.chunks.pop(one)
    with pytest.raises(StoreError, match="lacks chunks of the previous snapshot's memory"):
        ingested(store, region, first)


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
