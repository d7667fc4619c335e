"""Verify a store without any key: check every bit of every object, and look for missing chunks.

Damage is reported per object, together with the snapshots that need the object.
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
from vmckpt.units import Bytes, show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A damaged or unreadable object."""

    key: str
    """The object's key."""
    what: str
    snapshots: tuple[str, ...] = ()
    """Snapshots that cannot be restored without this object."""
    kind: type[StoreError] = StoreDamaged
    """StoreDamaged: the object is damaged, or has a newer version. StoreError: the object could not
    be read, so whether it is damaged is unknown."""

    def __str__(self) -> str:
        needed = f"; needed by {', '.join(self.snapshots)}" if self.snapshots else ""
        return f"{self.key}: {self.what}{needed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of a verification: what was read, and the damage found."""

    wrong: tuple[Wrong, ...]
    objects: int
    bytes: Bytes
    snapshots: int


VerifyProgress = Callable[[Bytes, Bytes], None]
"""Called with the number of bytes verified and the total."""


def verify(
    store: Store, references: References, *, parallel: int = 2,
    progress: VerifyProgress = lambda _done, _all: None,
) -> Verified:  # fmt: skip
    """Read and verify all objects of a store. Raises StoreError if the store cannot be listed.

    `parallel`: number of packs that are verified at the same time.
    """
    walk = _Walk(store, parallel, progress)
    wrong = list(_small(store, walk))
    walk.packs()
    needed, unread = _manifests(store, references, walk)
    # A concurrent garbage collection may have moved chunks to new packs.
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
    """Return the finding for a snapshot that lacks `gone` of its `of` chunks.

    `kind` is StoreError if the chunks may be in packs that could not be read, else StoreDamaged.
    """
    where = "without an intact copy" if kind is StoreDamaged else "without a readable copy"
    return Wrong(
        key=f"snapshots/{id_}", snapshots=(id_,), kind=kind,
        what=f"{gone} of its {show_count(of, 'chunk')} {where}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Damaged:
    """A pack that is damaged or could not be read."""

    key: str
    what: str
    names: Names
    """Names of the pack's damaged chunks, as far as known."""
    kind: type[StoreError] = StoreDamaged


@dataclass(frozen=True, slots=True)
class _Seen:
    """The result of verifying one pack."""

    good: Names
    damaged: _Damaged | None = None


class _Walk:
    """Reads the packs of a store; each later call of `packs` reads the packs added since."""

    def __init__(self, store: Store, parallel: int, progress: VerifyProgress) -> None:
        self.damaged: list[_Damaged] = []
        self.objects = self.bytes = 0
        self._store, self._parallel, self._progress = store, parallel, progress
        self._seen: set[str] = set()
        self._good = NameSet(())

    def packs(self) -> bool:
        """Verify all packs that have not been verified yet. Returns whether there were any."""
        new = [one for one in self._store.backend.keys("packs/") if one.key not in self._seen]
        self._seen.update(one.key for one in new)
        with ThreadPoolExecutor(self._parallel, "verify") as pool:
            found = self._counted(new, pool.map(self._pack, new))
            self._good = NameSet(itertools.chain([self._good.names], found))
        return bool(new)

    def lost(self, names: Names) -> NDArray[np.bool_]:
        """Return which of the names have no intact copy."""
        return self._good.positions(names) < 0

    def count(self, one: Stored) -> None:
        """Count an object as verified."""
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
        """Verify a pack, in a thread of the pool. Returns None if the pack is gone."""
        pack = format_pack.pack_of(one.key)
        none = names_of(())
        if pack is None:
            return _Seen(none, _Damaged(one.key, "its name is not a pack ID", none))
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
    """Verify all objects except packs and manifests. Yields a finding for each damaged object."""
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
    """Return the chunks that each snapshot needs, and the manifests that cannot be read."""
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
    """Return StoreDamaged for damage or a newer version, and StoreError if a read failed."""
    return StoreDamaged if isinstance(error, StoreDamaged | StoreNewer) else StoreError


def _who_needs(one: _Damaged, needed: Mapping[str, Names], walk: _Walk) -> tuple[str, ...]:
    """Return the snapshots that need a damaged chunk without an intact copy elsewhere."""
    bad = NameSet([one.names[walk.lost(one.names)]])
    return tuple(id_ for id_, names in needed.items() if (bad.positions(names) >= 0).any())
