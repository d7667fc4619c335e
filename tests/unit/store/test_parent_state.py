"""The line state, and a snapshot without what nothing names: both for guests of any size."""

import mmap
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.snapshots import bare, ram
from vmckpt.store import ingest, parent_state
from vmckpt.store.format import chunk_map, private_part
from vmckpt.store.format.chunk_map import SLOTS, UNIT, ZERO, Extent, Kind, What
from vmckpt.store.ingest import Ingest, Table
from vmckpt.store.parent_state import Draft
from vmckpt.units import Bytes

PAGES = 700


class Region:
    """Memory of random pages, in an array."""

    kind, name, size = Kind.RAM, "pc.ram", Bytes(PAGES * UNIT[Kind.RAM])

    def __init__(self) -> None:
        self.rows = np.random.default_rng(1).integers(0, 256, (PAGES, 4096), dtype=np.uint8)

    def extents(self) -> list[Extent]:
        return [Extent(0, PAGES, What.DATA)]

    def read(self, start: int, count: int) -> memoryview:
        return memoryview(self.rows[start : start + count].tobytes())


class Sink:
    """Knows every chunk it was given."""

    def __init__(self) -> None:
        self.wrote = 0

    def add(self, plain: bytes | memoryview) -> "Future[bytes]":
        self.wrote += len(plain)
        done: Future[bytes] = Future()
        done.set_result(self.wrote.to_bytes(32, "big"))
        return done

    def has(self, digest: bytes) -> bool:
        return True


def kept(folder: Path, region: Region, sink: Sink) -> None:
    """One snapshot of a line."""
    past = parent_state.load(folder)
    table = Table(past.chunks if past is not None else ())
    with Draft(folder) as draft:
        prints = draft.prints(region.name, region.kind, region.size)
        before = None if past is None else past.regions[region.name]
        place = draft.map(region.kind, region.size)
        work = Ingest(sink, table, stop=threading.Event())
        map_ = work.region(region, before, prints, place)
        assert map_ is place
        base: object = map_.base
        assert isinstance(base, mmap.mmap)  # else it is never let go of
        draft.keep("s-aaaaaaaaaaaaaaaa", table.digests(), {region.name: map_}, {"epoch": 1})


def test_a_line_goes_on_where_it_was_with_its_files_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest, "_WINDOW", 64 * UNIT[Kind.RAM])
    monkeypatch.setattr(ingest, "_SELDOM", 1)
    region, sink = Region(), Sink()
    kept(tmp_path / "line", region, sink)
    assert sink.wrote == region.size
    for changed in (3, 501):
        region.rows[changed] += 1
        sink.wrote = 0
        kept(tmp_path / "line", region, sink)
        assert sink.wrote == UNIT[Kind.RAM]


@pytest.mark.parametrize("name", ["line.json", "chunks", "0.prints", "0.map.npy"])
def test_a_line_with_a_flipped_bit_is_none(tmp_path: Path, name: str) -> None:
    kept(tmp_path / "line", Region(), Sink())
    assert parent_state.load(tmp_path / "line") is not None
    data = bytearray((tmp_path / "line" / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / "line" / name).write_bytes(data)
    assert parent_state.load(tmp_path / "line") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.just(-1) | st.integers(0, 9 * SLOTS - 1), max_size=60))
def test_what_nothing_names_is_left_out_and_all_else_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch, values: list[int]
) -> None:
    monkeypatch.setattr(chunk_map, "BLOCK", 7)
    before = bare([ram(values)], [bytes([number]) * 32 for number in range(9)])
    after = private_part.compacted(bare([ram(values)], before.chunks))

    def named(map_: np.ndarray, chunks: list[bytes]) -> list[tuple[bytes, int] | None]:
        return [
            None if one == ZERO else (chunks[int(one) // SLOTS], int(one) % SLOTS) for one in map_
        ]

    told = named(after.regions[0].map, list(after.chunks))
    assert told == named(before.regions[0].map, list(before.chunks))
    assert {one[0] for one in told if one is not None} == set(after.chunks)
