"""Which packs hold what snapshots need: the home of each chunk. Pure.

A chunk that lies in several packs is needed in one of them, its *home*: of those that are not
condemned the one that was rewritten most often. A foreign pack may hold another box than the one
that its name tells of (see `packs`), and nobody can see which of several boxes is the right one. So
unless a pack of the store's own that is not condemned has the chunk, every different box of it that
is in foreign packs has a home, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.index import Index, Names, NameSet, Run
from vmckpt.store.packs import FOOTER, HASH, HEADER, ROW

_USABLE = 1 << 40
"""Added to the rank of a pack that is not condemned."""
Ranks = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Use:
    """What manifests need of packs."""

    needed: Mapping[str, int]
    """Bytes of a pack with only the boxes whose home it is; packs with none are not in it."""
    homes: Mapping[str, Names]
    """Names by pack whose home it is."""
    missing: Names
    """Names that no pack has."""


def use_of(index: Index, condemned: "frozenset[str]", live: NameSet) -> Use:
    """Give every chunk that is needed its home."""
    homes = _Homes(index, condemned, live)
    needed: dict[str, int] = {}
    names: dict[str, list[Names]] = {}
    for run in index.runs:
        ours = homes.chosen(run)
        ours = ours[np.argsort(run.entries["pack"][ours], kind="stable")]
        numbers, starts = np.unique(run.entries["pack"][ours], return_index=True)
        for number, these in zip(numbers, np.split(ours, starts[1:]), strict=False):
            pack = run.packs[number].id
            entries = run.entries[these]
            # With its rows, too: else a pack of tiny boxes would be rewritten for ever.
            size = int(entries["length"].astype(np.int64).sum()) + len(entries) * ROW.itemsize
            needed[pack] = needed.get(pack, HEADER + FOOTER) + size
            names.setdefault(pack, []).append(entries["name"].copy())
    return Use(
        needed, {pack: np.concatenate(parts) for pack, parts in names.items()}, homes.missing
    )


class _Homes:
    """The rank of each chunk's home, and of its other boxes' in foreign packs."""

    def __init__(self, index: Index, condemned: "frozenset[str]", live: NameSet) -> None:
        packs = index.packs()
        self._ranks = {
            info.id: rank + (_USABLE if info.id not in condemned else 0)
            for rank, info in enumerate(
                sorted(packs.values(), key=lambda one: (one.generation, one.id))
            )
        }
        self._live = live
        self._own = np.full(len(live), -1, dtype=np.int64)
        self._foreign = np.full(len(live), -1, dtype=np.int64)
        self._box = np.zeros(len(live), dtype=f"V{HASH}")
        self._others: dict[tuple[int, bytes], int] = {}
        for run in index.runs:
            for at, rank, _ in self._entries(run, foreign=False):
                np.maximum.at(self._own, at, rank)
        for run in index.runs:
            for at, rank, _ in self._entries(run, foreign=True):
                np.maximum.at(self._foreign, at, rank)
        for run in index.runs:
            for at, rank, entries in self._entries(run, foreign=True):
                first = rank == self._foreign[at]
                self._box[at[first]] = run.entries["hash"][entries[first]]
        for run in index.runs:
            for at, rank, entries in self._entries(run, foreign=True):
                self._differing(run, at, rank, entries)

    @property
    def missing(self) -> Names:
        """Names that no pack has."""
        lost: Names = self._live.names[(self._own < 0) & (self._foreign < 0)]
        return lost

    def chosen(self, run: Run) -> Ranks:
        """The entries of a run that are at home there."""
        found = []
        for at, rank, entries in self._entries(run, foreign=False):
            found.append(entries[rank == self._own[at]])
        for at, rank, entries in self._entries(run, foreign=True):
            same = np.asarray(run.entries["hash"][entries] == self._box[at], dtype=bool)
            home = same & (rank == self._foreign[at])
            for one in np.flatnonzero(~same).tolist():
                box = run.entries["hash"][entries[one]].tobytes()
                home[one] = self._others[int(at[one]), box] == rank[one]
            found.append(entries[home])
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)

    def _differing(self, run: Run, at: Ranks, rank: Ranks, entries: Ranks) -> None:
        """Note boxes that are not the one that was found first."""
        same = np.asarray(run.entries["hash"][entries] == self._box[at], dtype=bool)
        for one in np.flatnonzero(~same).tolist():
            key = int(at[one]), run.entries["hash"][entries[one]].tobytes()
            self._others[key] = max(self._others.get(key, -1), int(rank[one]))

    def _entries(self, run: Run, *, foreign: bool) -> Iterator[tuple[Ranks, Ranks, Ranks]]:
        """Of the entries in such packs: the chunk's place among all, the pack's rank, the number.

        Of foreign ones those alone that no own pack settles.
        """
        usable = {info.id for info in run.usable if info.foreign is foreign}
        if not usable:
            return
        told = [self._ranks[info.id] if info.id in usable else -1 for info in run.packs]
        ranks = np.array(told, dtype=np.int64)[run.entries["pack"]]
        at = self._live.positions(run.entries["name"])
        wanted: Flags = (at >= 0) & (ranks >= 0)
        entries = np.flatnonzero(wanted)
        if foreign:
            entries = entries[self._own[at[entries]] < _USABLE]
        yield at[entries], ranks[entries], entries
