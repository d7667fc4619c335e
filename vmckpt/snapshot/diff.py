"""Compare two snapshots by their manifests alone. Pure.

A unit counts as unchanged if both snapshots have it in the same chunk at the same position. A unit
stored in two different chunks counts as changed even if its bytes are equal. So the numbers are
upper bounds; they are exact between a snapshot and its parent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.format.chunk_map import SLOTS, UNIT, ZERO, Kind, Map
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.units import MIB, Bytes

_BLOCK = 1 << 20
_NOTHING = np.int64(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDiff:
    """The changes of a region that exists in one or both snapshots."""

    name: str
    kind: Kind
    before: Bytes | None
    """Size in the older snapshot; None if the region did not exist."""
    after: Bytes | None
    """Size in the newer snapshot; None if the region no longer exists."""
    changed: int
    """Number of units that differ. A unit in only one snapshot counts unless it is all zeros."""
    zeroed: int
    """Number of changed units that are all zeros in the newer snapshot."""
    filled: int
    """Number of changed units that were all zeros or missing in the older snapshot."""

    @property
    def size(self) -> Bytes:
        """Number of bytes that differ."""
        return Bytes(self.changed * UNIT[self.kind])

    @property
    def mib(self) -> float:
        return self.size / MIB


def compare(before: Private, after: Private) -> tuple[RegionDiff, ...]:
    """Return the changes of all regions, in the order of the newer snapshot.

    Regions that the newer snapshot lacks come last.
    """
    table = _Table(before.chunks, after.chunks)
    gone = [old for old in before.regions if not _same_kind(old, after.region(old.name))]
    found = []
    for new in after.regions:
        old = before.region(new.name)
        found.append(_region(old if _same_kind(new, old) else None, new, table))
    return (*found, *(_region(old, None, table) for old in gone))


def changed(before: Private, after: Private, name: str) -> NDArray[np.int64]:
    """Return the units of a region that differ; for an exact result, compare the units' bytes.

    The result is empty if only one of the snapshots has the region.
    """
    old, new = before.region(name), after.region(name)
    if old is None or new is None or not _same_kind(old, new):
        return np.empty(0, dtype=np.int64)
    table = _Table(before.chunks, after.chunks)
    count = min(len(old.map), len(new.map))
    found = [
        np.flatnonzero(
            table.old(old.map[at : min(at + _BLOCK, count)])
            != table.numbers(new.map[at : min(at + _BLOCK, count)])
        )
        + at
        for at in range(0, count, _BLOCK)
    ]
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


class _Table:
    """Translates map numbers of both snapshots to the older snapshot's chunk table."""

    def __init__(self, before: Sequence[bytes], after: Sequence[bytes]) -> None:
        # If the older table has a digest twice, the first index stands for both.
        first: dict[bytes, int] = {}
        self._old = np.array(
            [first.setdefault(digest, index) for index, digest in enumerate(before)],
            dtype=np.int64,
        )
        self._new = np.array([first.get(digest, -1) for digest in after], dtype=np.int64)

    def numbers(self, part: Map) -> NDArray[np.int64]:
        """Translate the numbers in a map of the newer snapshot.

        `_NOTHING` stands for each chunk that the older snapshot lacks.
        """
        return _numbers(part, self._new)

    def old(self, part: Map) -> NDArray[np.int64]:
        return _numbers(part, self._old)


def _numbers(part: Map, table: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers = np.full(len(part), np.int64(ZERO), dtype=np.int64)
    there = np.flatnonzero(part != ZERO)
    entries = part[there].astype(np.int64)
    chunks = table[entries // SLOTS]
    numbers[there] = np.where(chunks < 0, _NOTHING, chunks * SLOTS + entries % SLOTS)
    return numbers


def _region(old: RegionMap | None, new: RegionMap | None, table: _Table) -> RegionDiff:
    one = new or old
    if one is None:
        raise ValueError("neither snapshot has the region")
    zero = np.int64(ZERO)
    changed_, zeroed, filled = 0, 0, 0
    count = max(len(side.map) for side in (old, new) if side is not None)
    for at in range(0, count, _BLOCK):
        size = min(_BLOCK, count - at)
        was = _padded(None if old is None else table.old(old.map[at : at + size]), size)
        now = _padded(None if new is None else table.numbers(new.map[at : at + size]), size)
        differs = was != now
        changed_ += int(differs.sum())
        zeroed += int((differs & (now == zero)).sum())
        filled += int((differs & (was == zero)).sum())
    return RegionDiff(
        name=one.name,
        kind=one.kind,
        before=None if old is None else old.size,
        after=None if new is None else new.size,
        changed=changed_,
        zeroed=zeroed,
        filled=filled,
    )


def _padded(numbers: NDArray[np.int64] | None, size: int) -> NDArray[np.int64]:
    """Return a part of a map, padded with zeros to `size` units; None: only zeros."""
    padded = np.full(size, np.int64(ZERO), dtype=np.int64)
    if numbers is not None:
        padded[: len(numbers)] = numbers
    return padded


def _same_kind(one: RegionMap, other: RegionMap | None) -> bool:
    return other is not None and one.kind is other.kind
