"""A snapshot without chunks that nothing in it names. Pure."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.facts import Part
from vmckpt.store.inside import Private
from vmckpt.store.maps import Digests
from vmckpt.store.regions import SLOTS, ZERO, Map, blocks

Flags = NDArray[np.bool_]


def compacted(private: Private) -> Private:
    """Without what nothing names: a group may be stored anew after some of its units were named
    again, and a chunk that is listed is kept for ever. The maps are changed in place: a second one
    of 64 GiB would take 64 MiB."""
    used: Flags = np.zeros(len(private.chunks), dtype=bool)
    for region in private.regions:
        for part in blocks(region.map):
            used[part[part != ZERO] // np.uint32(SLOTS)] = True
    for stream in private.facts.stream:
        used[list(stream.chunks)] = True
    if used.all():
        return private
    places = np.cumsum(used, dtype=np.uint32) - np.uint32(1)
    for region in private.regions:
        _rename(region.map, places)
    return replace(
        private,
        chunks=Digests(Digests.of(private.chunks).array()[used].tobytes()),
        facts=replace(
            private.facts, stream=tuple(_renamed(part, places) for part in private.facts.stream)
        ),
    )


def _rename(map_: Map, places: NDArray[np.uint32]) -> None:
    for block in blocks(map_):
        there = block != ZERO
        old = block[there]
        block[there] = places[old // np.uint32(SLOTS)] * np.uint32(SLOTS) + old % np.uint32(SLOTS)


def _renamed(part: Part, places: NDArray[np.uint32]) -> Part:
    return replace(part, chunks=tuple(int(places[index]) for index in part.chunks))
