"""From maps and chunks back to a region's bytes."""

import numpy as np
import pytest

from tests.support.ingesting import Store, ingested, ram, scribble
from vmckpt.errors import StoreDamaged
from vmckpt.store.assemble import Assembly
from vmckpt.store.format.chunk_map import Kind


def test_a_map_that_does_not_fit_is_refused() -> None:
    store = Store()
    with pytest.raises(StoreDamaged, match="refers to a chunk"):
        Assembly(Kind.RAM, 4096, np.array([64], dtype=np.uint32), [b"x"], store)
    with pytest.raises(StoreDamaged, match="the length of a map does not match its region"):
        Assembly(Kind.RAM, 8192, np.array([0], dtype=np.uint32), [b"x"], store)
    store.chunks[b"x"] = bytes(4096)
    short = Assembly(Kind.RAM, 4096, np.array([1], dtype=np.uint32), [b"x"], store)
    with pytest.raises(StoreDamaged, match="does not match its snapshot's map"):
        short.read(0, 1)


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
