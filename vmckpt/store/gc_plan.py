"""Decide what a garbage collection removes, marks for deletion, rewrites and keeps. Pure.

A pack is removed in two steps. When no manifest needs the pack, it is *marked for deletion*. New
writers then no longer rely on its chunks. After the grace time, a later collection removes the
pack on two conditions: every running writer saw the deletion mark when it started, and no manifest
needs the pack by then. A writer that started earlier may have used the pack in a new manifest. In
that case the pack is kept. docs/formats.md proves that this is sufficient.

If several packs contain a chunk, only one copy is needed. The pack with that copy is the chunk's
*home*: of the packs not marked for deletion, the pack that was rewritten most often. A foreign pack
may contain wrong data for a chunk (see `pack`). Without a key it is unknown which of several sealed
chunks with the same name is right. So every distinct sealed chunk of that name in foreign packs has
its own home. This does not apply if one of the store's own packs contains the chunk and is not
marked for deletion.
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
    """A pack, and how much of the pack is needed."""

    id: str
    key: str
    size: int
    at: Seconds
    """When the pack was written, by the store's clock."""
    generation: int
    needed: int
    """Size, in bytes, that the pack would have with only the sealed chunks whose home is this pack;
    0: the pack is not needed."""
    condemned: bool
    foreign: bool = False
    """Whether this is a foreign pack; see `format.pack`."""


@dataclass(frozen=True, slots=True)
class Loose:
    """A small object that belongs to a snapshot that does not exist."""

    key: str
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GcTerms:
    """How long to wait, and when rewriting a pack is worthwhile."""

    grace: Seconds
    """An unneeded object of this age is marked for deletion. An object that has been marked for
    this long is removed."""
    life: Seconds
    """The owner of a lock is considered dead if the lock was not refreshed for this long."""
    sparse: float = 0.5
    """A pack is rewritten if less than this fraction of the pack is needed."""
    small: Bytes = Bytes(8 << 20)
    few: int = 8
    """If there are at least this many packs smaller than `small`, they are merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The state of a store when a garbage collection begins. Locks were read before manifests."""

    packs: Sequence[PackUse]
    condemned: Sequence[PendingDeletion]
    locks: Sequence[LockSeen]
    loose: Sequence[Loose]
    leftovers: Mapping[str, Seconds]
    """Leftovers of interrupted puts, and when each was written."""
    now: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDecision:
    """The actions of a garbage collection, in the order of the fields."""

    remove: Mapping[str, tuple[str, ...]]
    """Objects to remove, by the token of their pending deletion. Afterwards the pending deletion is
    deleted; its other objects are kept."""
    waiting: Mapping[str, str]
    """Why each pending deletion that cannot be carried out yet has to wait, by token."""
    rewrite: tuple[str, ...]
    """Packs to rewrite: the needed chunks are copied to new packs, then the old packs are marked
    for deletion."""
    condemn: tuple[str, ...]
    """Unneeded objects, to be marked for deletion."""
    clear: tuple[str, ...]
    """Leftovers of interrupted puts, to be removed."""


def dead_locks(found: Sequence[LockSeen], now: Seconds, terms: GcTerms) -> tuple[str, ...]:
    """Return the keys of locks whose owners are dead. `now`: by the store's clock.

    Excludes the lock of a garbage collection, because the next collection takes that lock over.
    """
    return tuple(
        one.key
        for one in found
        if not one.alive(now, terms.life) and one.work is not LockPurpose.GC
    )


def decide(scene: Scene, terms: GcTerms) -> GcDecision:
    """Decide what a garbage collection of a store has to do."""
    # Only objects known to be unneeded are removed, so an unreadable pack is kept.
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
    """Return why a pending deletion has to wait; None if its objects can be removed now."""
    if now - one.at < terms.grace:
        return (
            f"marked for deletion {max(0.0, now - one.at):.0f} s ago; the grace time is"
            f" {terms.grace:.0f} s"
        )
    for lock in alive:
        if lock.work in (LockPurpose.WRITE, None) and one.token not in lock.knows:
            return f"{lock.owner} was already running when these objects were marked for deletion"
    return None


def _worth_rewriting(scene: Scene, terms: GcTerms) -> tuple[str, ...]:
    """Return the packs that are largely unneeded and, if there are many small packs, those too."""
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
    """Return whether an object written at `at` has reached the grace age.

    Newer objects may be needed by a writer whose snapshot is not recorded yet.
    """
    return scene.now - at >= terms.grace


_USABLE = 1 << 40
"""Added to the rank of a pack that is not marked for deletion."""
Ranks = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Use:
    """Which chunks the manifests need from each pack."""

    needed: Mapping[str, int]
    """By pack ID: size, in bytes, that the pack would have with only the sealed chunks whose home
    is this pack. Excludes packs that are not the home of any chunk."""
    homes: Mapping[str, Names]
    """By pack ID: the names of the chunks whose home is that pack."""
    missing: Names
    """Names of needed chunks that no pack contains."""


def use_of(index: Index, condemned: "frozenset[str]", live: NameSet) -> Use:
    """Assign every needed chunk to its home.

    `condemned` contains the IDs of packs marked for deletion, `live` the names of needed chunks.
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
            # The size includes index rows; otherwise a pack of tiny chunks would always be sparse.
            size = int(entries["length"].astype(np.int64).sum()) + len(entries) * ROW.itemsize
            needed[pack] = needed.get(pack, HEADER + FOOTER) + size
            names.setdefault(pack, []).append(entries["name"].copy())
    return Use(
        needed, {pack: np.concatenate(parts) for pack, parts in names.items()}, homes.missing
    )


class _Homes:
    """The rank of each chunk's home, and the homes of its other sealed forms in foreign packs."""

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
        """Names of needed chunks that no pack contains."""
        lost: Names = self._live.names[(self._own < 0) & (self._foreign < 0)]
        return lost

    def chosen(self, run: Run) -> Ranks:
        """Return the indexes of the run's entries that are in the home of their chunk."""
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
        """Record sealed chunks that differ from the sealed chunk of the same name in its home."""
        same = np.asarray(run.entries["hash"][entries] == self._box[at], dtype=bool)
        for one in np.flatnonzero(~same).tolist():
            key = int(at[one]), run.entries["hash"][entries[one]].tobytes()
            self._others[key] = max(self._others.get(key, -1), int(rank[one]))

    def _entries(self, run: Run, *, foreign: bool) -> Iterator[tuple[Ranks, Ranks, Ranks]]:
        """Yield three arrays for the needed entries of a run, in either own or foreign packs.

        The arrays contain each chunk's position in `live`, its pack's rank, and the entry's index
        in the run. Skips foreign entries if one of the store's own packs, not marked for deletion,
        has the chunk.
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
