"""Proves without any key what some snapshots need, and reads no more of the store than that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.snapshot.keeping import references
from vmckpt.store.chunk_index import Flags, Names, NameSet
from vmckpt.store.format import pack as format_pack
from vmckpt.store.repository import Store, bare
from vmckpt.store.verify import (
    Verified,
    VerifyProgress,
    Wrong,
    lacking,
    unread,
)
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
    damaged: list[tuple[str, str, Names]] = field(default_factory=list)
    """Packs, what is wrong with each, and the chunks that are damaged in it."""
    bytes: int = 0


def verify_some(store: Store, ids: Sequence[str], progress: VerifyProgress) -> Verified:
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
    walk.wrong += [_damaged(walk, *one) for one in walk.damaged]
    if not walk.good.all():
        # Nobody knows what is in a pack without an index: it may be what is missing.
        walk.wrong += [
            Wrong(
                key=format_pack.key_of(pack),
                what=bare(exc, store, format_pack.key_of(pack)),
                kind=unread(exc),
            )
            for pack, exc in store.catalog.load().unreadable.items()
        ]
    lost = {id_: int((~walk.good[wanted.positions(names)]).sum()) for id_, names in needed.items()}
    kind = StoreError if any(one.kind is StoreError for one in walk.wrong) else StoreDamaged
    snapshots = [
        lacking(id_, count, len(needed[id_]), kind) for id_, count in lost.items() if count
    ]
    return Verified(
        wrong=(*walk.wrong, *snapshots),
        objects=len(walk.seen) + len(ids),
        bytes=Bytes(walk.bytes),
        snapshots=len(ids),
    )


def _look(walk: _Walk, progress: VerifyProgress) -> bool:
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
    key = format_pack.key_of(pack)
    try:
        data = walk.store.backend.get(key)
    except NotInStore:
        return  # a collection has taken it; what is needed of it is in another one
    except StoreError as exc:
        walk.wrong.append(Wrong(key=key, what=exc.message, kind=unread(exc)))
        return
    try:
        good = format_pack.parse(pack, data).rows["name"]
    except (StoreDamaged, StoreNewer) as exc:
        good, bad = format_pack.salvage(data)
        walk.damaged.append((key, exc.message, bad))
    at = walk.wanted.positions(good)
    walk.good[at[at >= 0]] = True


def _damaged(walk: _Walk, key: str, what: str, bad: Names) -> Wrong:
    """With who needs it: of what is damaged in it there may be another copy, which is whole."""
    at = walk.wanted.positions(bad)
    at = at[at >= 0]
    lost = NameSet([walk.wanted.names[at[~walk.good[at]]]])
    by = [id_ for id_, names in walk.needed.items() if (lost.positions(names) >= 0).any()]
    return Wrong(key=key, what=what, snapshots=tuple(by))
