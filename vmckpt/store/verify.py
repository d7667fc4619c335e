"""Proves a store without any key: every bit of every object, and that nothing is missing.

What is wrong is told by object, with the snapshots that need it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.store.backend.base import Stored
from vmckpt.store.chunk_index import Names, NameSet, names_of
from vmckpt.store.format import manifest
from vmckpt.store.format import pack as format_pack
from vmckpt.store.gc import References
from vmckpt.store.repository import Store, bare, parse_format, small_objects
from vmckpt.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """One thing that is not as it was written."""

    key: str
    """The object."""
    what: str
    snapshots: tuple[str, ...] = ()
    """Those that cannot be restored because of it."""
    kind: type[StoreError] = StoreDamaged
    """StoreError: it could not be read, and nobody knows."""

    def __str__(self) -> str:
        needed = f"; needed by {', '.join(self.snapshots)}" if self.snapshots else ""
        return f"{self.key}: {self.what}{needed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was looked at, and what is wrong."""

    wrong: tuple[Wrong, ...]
    objects: int
    bytes: Bytes
    snapshots: int


VerifyProgress = Callable[[Bytes, Bytes], None]
"""Told how many bytes of how many were looked at."""


def verify(
    store: Store, references: References, *, parallel: int = 2,
    progress: VerifyProgress = lambda _done, _all: None,
) -> Verified:  # fmt: skip
    """Read all of a store. Raises StoreError if it cannot be read at all."""
    walk = _Walk(store, parallel, progress)
    wrong = list(_small(store, walk))
    walk.packs()
    needed, unread = _manifests(store, references, walk)
    # A collection beside us may have put chunks into packs that were not there before.
    while any(walk.lost(names).any() for names in needed.values()) and walk.packs():
        pass
    kind = StoreError if any(one.kind is StoreError for one in walk.damaged) else StoreDamaged
    snapshots = [
        lacking(id_, int(gone.sum()), len(names), kind)
        for id_, names in needed.items()
        if (gone := walk.lost(names)).any()
    ]
    packs_wrong = [
        Wrong(key=one.key, what=one.what, snapshots=_who_needs(one, needed, walk), kind=one.kind)
        for one in walk.damaged
    ]
    return Verified(
        wrong=(*wrong, *packs_wrong, *unread, *snapshots),
        objects=walk.objects,
        bytes=Bytes(walk.bytes),
        snapshots=len(needed) + len(unread),
    )


def lacking(id_: str, gone: int, of: int, kind: type[StoreError]) -> Wrong:
    """A snapshot some of whose chunks were found nowhere. `kind`: StoreError if they may be in what
    could not be read."""
    where = "in no pack that is whole" if kind is StoreDamaged else "in no pack that could be read"
    return Wrong(
        key=f"snapshots/{id_}", snapshots=(id_,), kind=kind,
        what=f"{gone} of its {of} chunks are {where}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Damaged:
    """A pack that is not whole, or could not be read."""

    key: str
    what: str
    names: Names
    """Chunks that are damaged in it, as far as it tells."""
    kind: type[StoreError] = StoreDamaged


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one pack gave."""

    good: Names
    damaged: _Damaged | None = None


class _Walk:
    """Goes through the packs, and again through those that came later."""

    def __init__(self, store: Store, parallel: int, progress: VerifyProgress) -> None:
        self.damaged: list[_Damaged] = []
        self.objects = self.bytes = 0
        self._store, self._parallel, self._progress = store, parallel, progress
        self._seen: set[str] = set()
        self._good = NameSet(())

    def packs(self) -> bool:
        """Look at all packs that were not looked at; whether there was any."""
        new = [one for one in self._store.backend.keys("packs/") if one.key not in self._seen]
        self._seen.update(one.key for one in new)
        with ThreadPoolExecutor(self._parallel, "verify") as pool:
            found = self._counted(new, pool.map(self._pack, new))
            self._good = NameSet(itertools.chain([self._good.names], found))
        return bool(new)

    def lost(self, names: Names) -> NDArray[np.bool_]:
        """Which of the names are in no pack that is whole."""
        return self._good.positions(names) < 0

    def count(self, one: Stored) -> None:
        """An object was looked at."""
        self.objects += 1
        self.bytes += one.size

    def _counted(self, new: list[Stored], seen: Iterable[_Seen | None]) -> Iterator[Names]:
        total = Bytes(self.bytes + sum(one.size for one in new))
        for one, found in zip(new, seen, strict=True):
            self.count(one)
            self._progress(Bytes(self.bytes), total)
            if found is not None:
                if found.damaged is not None:
                    self.damaged.append(found.damaged)
                yield found.good

    def _pack(self, one: Stored) -> _Seen | None:
        """In a thread: one pack; None if it is gone."""
        pack = format_pack.pack_of(one.key)
        none = names_of(())
        if pack is None:
            return _Seen(none, _Damaged(one.key, "its name is not one of a pack", none))
        try:
            data = self._store.backend.get(one.key)
        except NotInStore:
            return None
        except StoreError as exc:
            return _Seen(none, _Damaged(one.key, exc.message, none, unread(exc)))
        try:
            return _Seen(format_pack.parse(pack, data).rows["name"])
        except (StoreDamaged, StoreNewer) as exc:
            good, bad = format_pack.salvage(data)
            return _Seen(good, _Damaged(one.key, exc.message, bad))


def _small(store: Store, walk: _Walk) -> Iterator[Wrong]:
    """Everything but packs and manifests."""
    for one in list(small_objects(store.backend)):
        try:
            raw = store.backend.get(one.key)
            if one.key.startswith("wraps/"):
                manifest.unframed(one.key, raw, store.backend.where)
            elif one.key == "format":
                parse_format(raw, store.backend.where)
            else:
                manifest.parsed(one.key, raw, store.backend.where)
        except NotInStore:
            continue
        except StoreError as exc:
            id_ = one.key.rpartition("/")[2]
            needed = (id_,) if one.key.startswith("wraps/") else ()
            what = bare(exc, store, one.key)
            yield Wrong(key=one.key, what=what, snapshots=needed, kind=unread(exc))
        walk.count(one)


def _manifests(
    store: Store, references: References, walk: _Walk
) -> tuple[dict[str, Names], list[Wrong]]:
    """What each snapshot needs, and those that cannot tell."""
    needed, wrong = {}, []
    for one in store.manifests():
        key = f"snapshots/{one.id}"
        try:
            needed[one.id] = names_of(references(store.manifest(one.id)))
        except NotInStore:
            continue
        except StoreError as exc:
            what = bare(exc, store, key)
            wrong.append(Wrong(key=key, what=what, snapshots=(one.id,), kind=unread(exc)))
        walk.count(Stored(key, one.size, one.at))
    return needed, wrong


def unread(error: StoreError) -> type[StoreError]:
    """Whether it is damage, or the store only gave no answer."""
    return StoreDamaged if isinstance(error, StoreDamaged | StoreNewer) else StoreError


def _who_needs(one: _Damaged, needed: Mapping[str, Names], walk: _Walk) -> tuple[str, ...]:
    """Of what is damaged in it there may be another copy, which is whole."""
    bad = NameSet([one.names[walk.lost(one.names)]])
    return tuple(id_ for id_, names in needed.items() if (bad.positions(names) >= 0).any())
