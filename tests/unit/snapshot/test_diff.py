from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.snapshots import bare, maps, ram
from vmckpt.snapshot.diff import RegionDiff, changed, compare
from vmckpt.store.format.chunk_map import SLOTS, UNIT, ZERO, Kind, Map
from vmckpt.store.format.private_part import Private
from vmckpt.units import Bytes

A, B, C = (bytes([one]) * 32 for one in (1, 2, 3))


def of(map_: Map, chunks: list[bytes]) -> Private:
    return bare([replace(ram([0]), map=map_, size=Bytes(len(map_) * 4096))], chunks)


def contents(private: Private) -> list[tuple[bytes, int] | None]:
    """What each unit is, the slow way."""
    return [
        None if one == ZERO else (private.chunks[one // SLOTS], one % SLOTS)
        for one in private.regions[0].map.tolist()
    ]


def test_the_same_chunk_at_another_index_is_the_same() -> None:
    (found,) = compare(bare([ram([0, 1, -1, 64])], [A, B]), bare([ram([64, 65, -1, 0])], [B, A]))

    assert found == RegionDiff(
        name="pc.ram", kind=Kind.RAM, before=Bytes(16384), after=Bytes(16384), changed=0, zeroed=0,
        filled=0,
    )  # fmt: skip


def test_what_was_zeroed_filled_and_changed_is_counted() -> None:
    before, after = bare([ram([0, 1, -1, 2])], [A]), bare([ram([-1, 1, 2, 64])], [A, C])
    (found,) = compare(before, after)

    assert (found.changed, found.zeroed, found.filled) == (3, 1, 1)
    assert (found.size, found.mib) == (12288, 12288 / (1 << 20))
    assert changed(before, after, "pc.ram").tolist() == [0, 2, 3]


def test_a_disk_counts_in_units_of_its_own() -> None:
    (found,) = compare(
        bare([ram([0, 1], "vda", Kind.DISK)], [A]), bare([ram([0, 0], "vda", Kind.DISK)], [A])
    )

    assert (found.changed, found.mib) == (1, 1 / 16)


def test_regions_come_go_and_grow() -> None:
    before = bare([ram([0, -1], "gone"), ram([0], "grows"), ram([0, 1], "other", Kind.RAM)], [A])
    after = bare([ram([0, 1, -1], "grows"), ram([0], "other", Kind.DISK), ram([-1], "new")], [A])
    found = {
        (one.name, one.before is None, one.after is None): one for one in compare(before, after)
    }

    assert {key: (one.changed, one.zeroed, one.filled) for key, one in found.items()} == {
        ("grows", False, False): (1, 0, 1),
        ("other", True, False): (1, 0, 1),
        ("new", True, False): (0, 0, 0),
        ("gone", False, True): (1, 1, 0),
        ("other", False, True): (2, 2, 0),
    }
    assert changed(before, after, "gone").size == 0


def test_a_digest_that_is_in_a_table_twice_is_one() -> None:
    (found,) = compare(bare([ram([0, 64])], [A, A]), bare([ram([64, 0])], [A, A]))

    assert found.changed == 0


@pytest.mark.parametrize("count", [(1 << 20) - 1, (1 << 20) + 1])
def test_long_regions_are_compared_block_by_block(count: int) -> None:
    map_ = np.arange(count, dtype=np.uint32)
    other = map_.copy()
    other[[0, count - 1]] = ZERO
    chunks = [number.to_bytes(32, "big") for number in range(count // SLOTS + 1)]

    assert changed(of(map_, chunks), of(other, chunks), "pc.ram").tolist() == [0, count - 1]


@given(maps(3, 40), maps(3, 40), st.permutations([A, B, C]))
def test_figures_are_those_of_comparing_one_by_one(one: Map, two: Map, table: list[bytes]) -> None:
    before, after = of(one, [A, B, C]), of(two, table)
    (found,) = compare(before, after)
    was, now = contents(before), contents(after)
    was += [None] * (len(now) - len(was))
    now += [None] * (len(was) - len(now))
    differs = [at for at in range(len(was)) if was[at] != now[at]]

    assert found.changed == len(differs)
    assert found.zeroed == sum(now[at] is None for at in differs)
    assert found.filled == sum(was[at] is None for at in differs)
    assert changed(before, after, "pc.ram").tolist() == [
        at for at in differs if at < min(len(one), len(two))
    ]
    assert found.size == len(differs) * UNIT[Kind.RAM]
