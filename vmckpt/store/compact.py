"""A snapshot without chunks that nothing in it names. Pure."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.facts import Part
from vmckpt.store.inside import Private, RegionMap
from vmckpt.store.regions import SLOTS, ZERO, Map

Flags = NDArray[np.bool_]
_BLOCK = 1 << 20


def compacted(private: Private) -> Private:
    """Without what nothing names: a group may be stored anew after some of its units were named
    again, and a chunk that is listed is kept for ever."""
    used: Flags = np.zeros(len(private.chunks), dtype=bool)
    for region in private.regions:
        for part in _blocks(region.map):
            used[part[part != ZERO] // np.uint32(SLOTS)] = True
    for stream in private.facts.stream:
        used[list(stream.chunks)] = True
    if used.all():
        return private
    places = (np.cumsum(used) - 1).astype(np.uint32)
    return replace(
        private,
        chunks=[private.chunks[index] for index in np.flatnonzero(used).tolist()],
        regions=tuple(_moved(region, places) for region in private.regions),
        facts=replace(
            private.facts, stream=tuple(_renamed(part, places) for part in private.facts.stream)
        ),
    )


def _moved(region: RegionMap, places: NDArray[np.uint32]) -> RegionMap:
    map_ = region.map.copy()
    for block in _blocks(map_):
        there = block != ZERO
        old = block[there]
        block[there] = places[old // np.uint32(SLOTS)] * np.uint32(SLOTS) + old % np.uint32(SLOTS)
    return replace(region, map=map_)


def _blocks(map_: Map) -> Iterator[Map]:
    """A map in parts: what is worked out of one of 64 GiB would take four times its memory."""
    return (map_[at : at + _BLOCK] for at in range(0, len(map_), _BLOCK))


def _renamed(part: Part, places: NDArray[np.uint32]) -> Part:
    return replace(part, chunks=tuple(int(places[index]) for index in part.chunks))
