"""What a collection removes, condemns, rewrites and leaves alone. Pure.

A pack goes in two steps. It is *condemned* when no manifest needs it: from then on no new writer
counts on what is in it. It is removed by a later collection, after the grace time, if every writer
that is still at work knew of the condemnation when it began, and still no manifest needs it: one
that was at work before may have named it meanwhile, and then it stays. docs/formats.md says why
this is enough.

A chunk that lies in several packs is needed in one of them, its *home*: of those that are not
condemned the one that was rewritten most often. A foreign pack may hold another box than the one
that its name tells of (see `pack`), and which of several boxes is the right one cannot be seen. So
unless a pack of the store's own that is not condemned has the chunk, every different box of it that
is in foreign packs has a home, too.
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
    """A pack, and what of it is needed."""

    id: str
    key: str
    size: int
    at: Seconds
    """When it was written, by the store's clock."""
    generation: int
    needed: int
    """Bytes of a pack with nothing but the boxes whose home it is; 0: nobody needs it."""
    condemned: bool
    foreign: bool = False
    """See `format.pack`."""


@dataclass(frozen=True, slots=True)
class Loose:
    """A small object that belongs to a snapshot which is not there."""

    key: str
    at: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GcTerms:
    """How long to wait, and when a rewrite is worth it."""

    grace: Seconds
    """How long before what nobody needs is condemned, and again before it is removed."""
    life: Seconds
    """How long after its last sign of life somebody is taken for dead."""
    sparse: float = 0.5
    """A pack of which less than this part is needed is rewritten."""
    small: Bytes = Bytes(8 << 20)
    few: int = 8
    """So many packs smaller than `small` are put together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A store as a collection finds it. Locks were looked at before manifests."""

    packs: Sequence[PackUse]
    condemned: Sequence[PendingDeletion]
    locks: Sequence[LockSeen]
    loose: Sequence[Loose]
    leftovers: Mapping[str, Seconds]
    """What puts that never ended have left, and since when."""
    now: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GcDecision:
    """What to do, in this order."""

    remove: Mapping[str, tuple[str, ...]]
    """By condemnation: the objects that go. Then it is closed; what it named besides stays."""
    waiting: Mapping[str, str]
    """By condemnation: why it is left for later."""
    rewrite: tuple[str, ...]
    """Packs whose needed boxes go into new packs; they are condemned then."""
    condemn: tuple[str, ...]
    """Objects that nobody needs."""
    clear: tuple[str, ...]
    """Leftovers."""


def dead_locks(found: Sequence[LockSeen], now: Seconds, terms: GcTerms) -> tuple[str, ...]:
    """Those whose owners are gone; a collection's is taken over by the next one."""
    return tuple(
        one.key
        for one in found
        if not one.alive(now, terms.life) and one.work is not LockPurpose.GC
    )


def decide(scene: Scene, terms: GcTerms) -> GcDecision:
    """Look at all of it once."""
    # What is not known to be useless stays: also a pack that cannot be read.
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
    """Why a condemnation cannot be carried out yet."""
    if now - one.at < terms.grace:
        return (
            f"condemned {max(0.0, now - one.at):.0f} s ago; the grace time is {terms.grace:.0f} s"
        )
    for lock in alive:
        if lock.work in (LockPurpose.WRITE, None) and one.token not in lock.knows:
            return f"{lock.owner} was at work before"
    return None


def _worth_rewriting(scene: Scene, terms: GcTerms) -> tuple[str, ...]:
    """Packs with much that nobody needs, and small ones if there are many."""
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
    """Whether something is old enough: a writer at work may name what is young in a moment."""
    return scene.now - at >= terms.grace


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
