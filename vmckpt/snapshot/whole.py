"""Proves without any key what some snapshots need, and reads no more of the store than that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.snapshot.keeping import references
from vmckpt.store import packs
from vmckpt.store.index import Flags, Names, NameSet
from vmckpt.store.store import Store, bare
from vmckpt.store.verify_store import Progress, Verified, Wrong
from vmckpt.units import Bytes


@dataclass(slots=True)
class _Walk:
    """Packs that were looked at."""

    store: Store
    wanted: NameSet
    good: Flags
    """Which of the chunks that are wanted were found whole."""
    needed: Mapping[str, Names]
    seen: set[str] = field(default_factory=set)
    wrong: list[Wrong] = field(default_factory=list)
    bytes: int = 0


def verify_some(store: Store, ids: Sequence[str], progress: Progress) -> Verified:
    """As `verify_store.verify`, for these snapshots. Manifests that cannot be read are left out."""
    needed = {}
    for id_ in ids:
        try:
            needed[id_] = references(store.manifest(id_))
        except (StoreDamaged, StoreNewer):
            continue
    wanted = NameSet(needed.values())
    walk = _Walk(store, wanted, np.zeros(len(wanted), dtype=bool), needed)
    # A collection may put some into packs that were not there before.
    while not walk.good.all() and _look(walk, progress):
        pass
    if not walk.good.all():
        # Nobody knows what is in a pack without an index: it may be what is missing.
        walk.wrong += [
            Wrong(key=packs.key_of(pack), what=bare(exc, store, packs.key_of(pack)))
            for pack, exc in store.catalog.load().unreadable.items()
        ]
    lost = {id_: int((~walk.good[wanted.positions(names)]).sum()) for id_, names in needed.items()}
    snapshots = [
        Wrong(
            key=f"snapshots/{id_}", snapshots=(id_,),
            what=f"{count} of its {len(needed[id_])} chunks are in no pack that is whole",
        )
        for id_, count in lost.items()
        if count
    ]  # fmt: skip
    return Verified(
        wrong=(*walk.wrong, *snapshots),
        objects=len(walk.seen) + len(ids),
        bytes=Bytes(walk.bytes),
        snapshots=len(ids),
    )


def _look(walk: _Walk, progress: Progress) -> bool:
    """Look at packs that have any of it and were not looked at; whether there was any."""
    sizes: dict[str, int] = {}
    for run in walk.store.catalog.load().index.runs:
        usable = {info.id for info in run.usable}
        ours = walk.wanted.positions(run.entries["name"]) >= 0
        for number in np.unique(run.entries["pack"][ours]).tolist():
            info = run.packs[number]
            if info.id in usable and info.id not in walk.seen:
                sizes[info.id] = info.size
    total = Bytes(walk.bytes + sum(sizes.values()))
    for pack, size in sorted(sizes.items()):
        walk.seen.add(pack)
        _pack(walk, pack)
        walk.bytes += size
        progress(Bytes(walk.bytes), total)
    return bool(sizes)


def _pack(walk: _Walk, pack: str) -> None:
    key = packs.key_of(pack)
    try:
        data = walk.store.backend.get(key)
    except NotInStore:
        return  # a collection has taken it; what is needed of it is in another one
    except StoreError as exc:
        walk.wrong.append(Wrong(key=key, what=exc.message))
        return
    try:
        good = packs.parse(pack, data).rows["name"]
    except (StoreDamaged, StoreNewer) as exc:
        good, bad = packs.salvage(data)
        lost = NameSet([bad])
        by = [id_ for id_, names in walk.needed.items() if (lost.positions(names) >= 0).any()]
        walk.wrong.append(Wrong(key=key, what=exc.message, snapshots=tuple(by)))
    at = walk.wanted.positions(good)
    walk.good[at[at >= 0]] = True
