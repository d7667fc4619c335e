"""Decide what a garbage collection removes, condemns, rewrites and keeps. Pure.

A pack is removed in two steps. It is *condemned* when no manifest needs it: from then on no new
writer relies on its chunks. A later collection removes it after the grace time, if every running
writer knew the condemnation when it started and still no manifest needs the pack. A writer that
started earlier may have used the pack in a new manifest; then it is kept. docs/formats.md proves
that this is sufficient.

A chunk in several packs is needed in only one of them, its *home*: among the packs that are not
condemned, the one rewritten most often. A foreign pack may hold a wrong box for a chunk (see
`pack`), and without a key it is unknown which box is right. So unless one of the store's own packs
that is not condemned has the chunk, every different box of it in foreign packs has a home, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.chunk_index import Index, Names, NameSet, Run
from vmckpt.store.format.pack import FOOTER, HASH, HEADER, ROW
from vmckpt.store.locks import LockPurpose, LockSeen
from vmckpt.store.pending_deletion import PendingDeletion
from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class PackUse:
    """A pack, and how much of it is needed."""

    id: str
    key: str
    size: int
    at: Seconds
    """When it was written, by the store's clock."""
    generation: int
    needed: int
    """Size in bytes of a pack with only the boxes whose home it is; 0: the pack is not needed."""
    condemned: bool
    foreign: bool = False
    """See `format.pack`."""


@dataclass(frozen=True, slots=True)
class Loose:
    """A small object whose snapshot does not exist."""

    key: str
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GcTerms:
    """How long to wait, and when a rewrite is worthwhile."""

    grace: Seconds
    """Age of an unneeded object before it is condemned, and then again before it is removed."""
    life: Seconds
    """Age of a lock, since its last refresh, from which its owner is considered dead."""
    sparse: float = 0.5
    """A pack is rewritten if less than this fraction of it is needed."""
    small: Bytes = Bytes(8 << 20)
    few: int = 8
    """Packs smaller than `small` are merged if there are at least this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A store as a garbage collection finds it. Locks were read before manifests."""

    packs: Sequence[PackUse]
    condemned: Sequence[PendingDeletion]
    locks: Sequence[LockSeen]
    loose: Sequence[Loose]
    leftovers: Mapping[str, Seconds]
    """Remains of interrupted puts, and when they were written."""
    now: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDecision:
    """What to do, in this order."""

    remove: Mapping[str, tuple[str, ...]]
    """Objects to remove, by token of their pending deletion, which is deleted afterwards. Its other
    objects are kept."""
    waiting: Mapping[str, str]
    """Why a pending deletion has to wait, by its token."""
    rewrite: tuple[str, ...]
    """Packs whose needed chunks are copied to new packs; they are condemned afterwards."""
    condemn: tuple[str, ...]
    """Objects that are not needed."""
    clear: tuple[str, ...]
    """Remains of interrupted puts."""


def dead_locks(found: Sequence[LockSeen], now: Seconds, terms: GcTerms) -> tuple[str, ...]:
    """Return the keys of locks whose owners are dead.

    A garbage collection's lock is left out, as the next collection takes it over.
    """
    return tuple(
        one.key
        for one in found
        if not one.alive(now, terms.life) and one.work is not LockPurpose.GC
    )


def decide(scene: Scene, terms: GcTerms) -> GcDecision:
    """Decide what to do with a store."""
    # Only objects known to be unneeded are removed, so a pack that cannot be read is kept.
    useless = {pack.key for pack in scene.packs if not pack.needed}
    useless |= {one.key for one in scene.loose}
    alive = [one for one in scene.locks if one.alive(scene.now, terms.life)]
    remove, waiting = {}, {}
    for one in scene.condemned:
        why = _hindered(one, alive, scene.now, terms)
        if why is None:
            remove[one.token] = tuple(key for key in one.keys if key in useless)
        else:
            waiting[one.token] = why
    judged = {key for one in scene.condemned for key in one.keys}
    found = [(pack.key, pack.at) for pack in scene.packs] + [
        (one.key, one.at) for one in scene.loose
    ]
    return GcDecision(
        remove=remove,
        waiting=waiting,
        rewrite=_worth_rewriting(scene, terms),
        condemn=tuple(
            key for key, at in found
            if key in useless and key not in judged and _old(at, scene, terms)
        ),
        clear=tuple(
            name for name, at in scene.leftovers.items()
            if scene.now - at >= max(terms.grace, terms.life)
        ),
    )  # fmt: skip


def _hindered(
    one: PendingDeletion, alive: Sequence[LockSeen], now: Seconds, terms: GcTerms
) -> str | None:
    """Return why a pending deletion has to wait; None if it can be carried out."""
    if now - one.at < terms.grace:
        return (
            f"marked for deletion {max(0.0, now - one.at):.0f} s ago; the grace time is"
            f" {terms.grace:.0f} s"
        )
    for lock in alive:
        if lock.work in (LockPurpose.WRITE, None) and one.token not in lock.knows:
            return f"{lock.owner} was already running when they were marked for deletion"
    return None


def _worth_rewriting(scene: Scene, terms: GcTerms) -> tuple[str, ...]:
    """Return packs of which a large part is not needed, and small packs if there are many."""
    usable = [
        pack for pack in scene.packs
        if pack.needed and not pack.condemned and _old(pack.at, scene, terms)
    ]  # fmt: skip
    sparse = {pack.id for pack in usable if pack.needed < terms.sparse * pack.size}
    chosen = sparse
    for foreign in (False, True):
        small = {
            pack.id for pack in usable if pack.size < terms.small and pack.foreign is foreign
        }  # fmt: skip
        chosen |= small if len(small) >= terms.few else set()
    return tuple(pack.id for pack in usable if pack.id in chosen)


def _old(at: Seconds, scene: Scene, terms: GcTerms) -> bool:
    """Return whether an object is old enough: a running writer may still refer to a newer one."""
    return scene.now - at >= terms.grace


_USABLE = 1 << 40
"""Added to the rank of a pack that is not condemned."""
Ranks = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Use:
    """Which chunks the manifests need from each pack."""

    needed: Mapping[str, int]
    """By pack: size in bytes of a pack with only the boxes whose home it is. Packs that are no
    chunk's home are left out."""
    homes: Mapping[str, Names]
    """By pack: the names of the chunks whose home it is."""
    missing: Names
    """Names of needed chunks that no pack has."""


def use_of(index: Index, condemned: "frozenset[str]", live: NameSet) -> Use:
    """Assign every needed chunk to its home.

    `condemned` are the IDs of condemned packs, `live` the names of the needed chunks.
    """
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
            # The size includes index rows; otherwise a pack of tiny boxes would always be sparse.
            size = int(entries["length"].astype(np.int64).sum()) + len(entries) * ROW.itemsize
            needed[pack] = needed.get(pack, HEADER + FOOTER) + size
            names.setdefault(pack, []).append(entries["name"].copy())
    return Use(
        needed, {pack: np.concatenate(parts) for pack, parts in names.items()}, homes.missing
    )


class _Homes:
    """The ranks of each chunk's home, and of the homes of its other boxes in foreign packs."""

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
        """Return the indexes of a run's entries whose home is their pack."""
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
        """Record boxes that differ from the box in the chunk's home."""
        same = np.asarray(run.entries["hash"][entries] == self._box[at], dtype=bool)
        for one in np.flatnonzero(~same).tolist():
            key = int(at[one]), run.entries["hash"][entries[one]].tobytes()
            self._others[key] = max(self._others.get(key, -1), int(rank[one]))

    def _entries(self, run: Run, *, foreign: bool) -> Iterator[tuple[Ranks, Ranks, Ranks]]:
        """Yield, for entries in own or in foreign packs, the chunk's position in `live`, the pack's
        rank, and the entry's index in the run.

        Foreign entries are left out if one of the store's own usable packs has the chunk.
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
