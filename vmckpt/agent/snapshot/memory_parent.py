"""The memory of the previous snapshot, whose unchanged pages the next snapshot keeps. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from vmckpt.capture.memory.page_diff import Flags
from vmckpt.store.format.chunk_map import GROUP, ZERO, Kind, Map, slots_of
from vmckpt.store.parent_state import ParentState

_GROUP = GROUP[Kind.RAM]


@dataclass(frozen=True, slots=True)
class MemoryParent:
    """The memory of the previous snapshot, as the next capture needs it."""

    number: int | None
    """Number of the memory's capture; None: unchanged pages cannot be taken from the snapshot."""
    why: str
    """Why `number` is None."""
    maps: Mapping[str, Map] = field(default_factory=lambda: MappingProxyType({}))
    """The map of each block, by the block's name."""


def memory_parent(past: ParentState | None, has: Callable[[bytes], bool]) -> MemoryParent:
    """Return the memory of the previous snapshot. `has`: whether the store has a chunk."""
    maps = {} if past is None else {
        name: one.map for name, one in past.regions.items() if one.prints is not None
    }  # fmt: skip
    if past is None or not maps:
        why = "this host has no earlier snapshot with memory in this store to build on"
        return MemoryParent(None, why)
    if past.extra.get("copy") is None:
        return MemoryParent(None, "writes were not tracked since the previous snapshot")
    used = np.zeros(len(past.chunks), dtype=np.bool_)
    for map_ in maps.values():
        used[slots_of(map_[map_ != ZERO])[0]] = True
    if not all(has(past.chunks[index]) for index in np.flatnonzero(used).tolist()):
        return MemoryParent(None, "the store lacks chunks of the previous snapshot's memory")
    return MemoryParent(int(past.extra["copy"]), "", maps)


def around(written: Flags, parent: Map | None) -> Flags:
    """Return which pages of a block must be read: the pages in `written`, and some others.

    If at least half of a chunk's pages were written, the store writes a new chunk, and needs all
    its pages. `parent`: the block's map in the previous snapshot; None: that snapshot did not have
    the block, so all pages must be read.
    """
    if parent is None or len(parent) != len(written):
        return np.ones(len(written), dtype=np.bool_)
    rest = _grouped((parent != ZERO) & ~written)
    groups = _grouped(written)
    counts = groups.sum(axis=1)
    rest[(counts == 0) | (counts < rest.sum(axis=1))] = False
    both: Flags = (groups | rest).reshape(-1)[: len(written)]
    return both


def _grouped(flags: Flags) -> Flags:
    """Return the flags as a matrix with one row for each group of _GROUP pages."""
    padded = np.zeros(-(-len(flags) // _GROUP) * _GROUP, dtype=np.bool_)
    padded[: len(flags)] = flags
    return padded.reshape(-1, _GROUP)
