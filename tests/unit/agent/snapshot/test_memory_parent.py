"""Which pages the next snapshot keeps of the one before, and which it must read."""

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from vmckpt.agent.snapshot.memory_parent import around, memory_parent
from vmckpt.store.format.chunk_map import SLOTS, ZERO
from vmckpt.store.ingest import Past
from vmckpt.store.parent_state import ParentState


def past(**extra: Any) -> ParentState:
    prints = np.zeros(4, dtype="V16")
    map_ = np.array([0, SLOTS + 3, ZERO, 2 * SLOTS], dtype=np.uint32)
    disk = np.array([3 * SLOTS], dtype=np.uint32)
    return ParentState(
        snapshot="s-1", chunks=[b"a", b"b", b"c", b"disk"],
        regions={"pc.ram": Past(map=map_, prints=prints), "vda": Past(map=disk, prints=None)},
        extra=MappingProxyType(extra),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("state", "lost", "number", "why"),
    [
        (None, set(), None, "no earlier snapshot with memory in this store"),
        (past(), set(), None, "writes were not tracked since"),
        (past(copy=None), set(), None, "writes were not tracked since"),
        (past(copy=7), set(), 7, ""),
        (past(copy=7), {b"disk"}, 7, ""),
        (past(copy=7), {b"c"}, None, "the store lacks chunks of the previous snapshot's memory"),
    ],
)
def test_unchanged_pages_are_kept_only_while_the_store_has_them(
    state: ParentState | None, lost: set[bytes], number: int | None, why: str
) -> None:
    found = memory_parent(state, lambda digest: digest not in lost)
    assert found.number == number
    assert why in found.why
    assert list(found.maps) == (["pc.ram"] if number is not None else [])


def pages(*some: int, count: int = 200) -> np.ndarray:
    flags = np.zeros(count, dtype=np.bool_)
    flags[list(some)] = True
    return flags


def test_the_rest_of_a_chunk_is_read_only_if_most_of_it_was_written() -> None:
    parent = np.full(200, ZERO, dtype=np.uint32)
    parent[:128] = np.arange(128)
    assert np.flatnonzero(around(pages(5), parent)).tolist() == [5]
    assert np.flatnonzero(around(pages(*range(31)), parent)).tolist() == list(range(31))
    assert np.flatnonzero(around(pages(*range(32)), parent)).tolist() == list(range(64))
    # The last group has only one page with data, which was not written.
    parent[199] = 7
    assert np.flatnonzero(around(pages(195), parent)).tolist() == [195, 199]


def test_a_block_that_is_new_is_read_whole() -> None:
    assert around(pages(1), None).all()
    assert around(pages(1), np.zeros(100, dtype=np.uint32)).all()
