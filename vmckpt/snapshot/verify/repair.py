"""Repair a store without any key: salvage damaged packs, and fetch the rest from other stores.

A damaged pack is harmful: writers rely on all its chunks, so the damaged chunks are never stored
again. Its intact sealed chunks are copied to a new pack, and then the damaged pack is removed; a
sealed chunk with a wrong hash cannot be opened anyway. A pack without an index is kept until no
snapshot lacks a chunk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vmckpt.errors import NotInStore, StoreDamaged, StoreNewer
from vmckpt.snapshot import copy
from vmckpt.snapshot.catalog import Progress, copied_so_far, references, silent, wrapped_of
from vmckpt.store import gc, verify
from vmckpt.store.chunk_index import Names, NameSet
from vmckpt.store.fault_injection import fault
from vmckpt.store.format import manifest
from vmckpt.store.format import pack as format_pack
from vmckpt.store.locks import LIFE, Lock
from vmckpt.store.pack_writer import Packing
from vmckpt.store.repository import Store
from vmckpt.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """The result of a repair, with the chunks that are still missing."""

    removed: tuple[str, ...]
    """Damaged objects that were removed or, if pins, replaced."""
    left: tuple[str, ...]
    """Packs that cannot be read and may contain missing chunks."""
    saved: int
    """Number of intact chunks that were copied from damaged packs."""
    brought: int
    """Number of sealed chunks that were copied from other stores."""
    brought_bytes: Bytes
    snapshots: tuple[str, ...]
    """Snapshots copied from other stores, as their manifests or wrapped keys were damaged."""
    lost: Mapping[str, int]
    """Number of chunks still missing, by snapshot."""

    def as_json(self) -> dict[str, Any]:
        return {
            "removed": list(self.removed),
            "left": list(self.left),
            "chunks_saved": self.saved,
            "chunks_copied": self.brought,
            "boxes_brought": self.brought,
            "bytes_brought": self.brought_bytes,
            "snapshots_brought": list(self.snapshots),
            "chunks_lost": dict(self.lost),
        }


@dataclass(slots=True)
class _Work:
    """A repair in progress."""

    store: Store
    sources: Sequence[Store]
    lock: Lock
    progress: Progress
    removed: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    """Packs without an index."""
    saved: int = 0
    brought: int = 0
    brought_bytes: int = 0
    snapshots: list[str] = field(default_factory=list)

    @property
    def doubtful(self) -> frozenset[str]:
        """IDs of packs without an index. This client may have cached the index from before the
        damage, but other clients cannot read these packs, so they must not be relied on.
        """
        return frozenset(
            pack for key in self.unread if (pack := format_pack.pack_of(key)) is not None
        )


def repair(store: Store, sources: Sequence[Store] = (), progress: Progress = silent) -> Repaired:
    """Repair a store, fetching missing data from `sources`.

    A lock prevents garbage collection meanwhile. Raises StoreError; the repair can then be
    repeated.
    """
    lock = gc.take_lock(store.backend, LIFE)
    try:
        work = _Work(store, sources, lock, progress)
        wrong = verify.verify(store, references, progress=_packs(progress)).wrong
        for one in wrong:
            if one.key.startswith(("condemned/", "pins/", "verified/")):
                _small(work, one.key)
        _salvage(work, [one.key for one in wrong if one.key.startswith("packs/")])
        _manifests(work)
        lost = _chunks(work)
        if not lost:
            _take_away(work, work.unread)
            work.unread = []
        return Repaired(
            removed=tuple(work.removed), left=tuple(work.unread), saved=work.saved,
            brought=work.brought, brought_bytes=Bytes(work.brought_bytes),
            snapshots=tuple(work.snapshots), lost=lost,
        )  # fmt: skip
    finally:
        lock.release()


def _packs(progress: Progress) -> verify.VerifyProgress:
    return lambda done, total: progress(copied_so_far("packs", done, total))


def _small(work: _Work, key: str) -> None:
    """Remove a damaged small object. A pin is replaced, as the snapshot must stay pinned.

    Deletion marks and results of checks can be created again.
    """
    backend = work.store.backend
    work.lock.still_ours()
    if key.startswith("pins/"):
        backend.put(key, manifest.written(key, {"why": "the pin was damaged"}), replace=True)
    else:
        backend.delete(key)
    work.removed.append(key)


def _salvage(work: _Work, keys: Sequence[str]) -> None:
    """Copy intact sealed chunks to new packs. Once these are durable, remove the damaged packs."""
    backend = work.store.backend
    saved: list[str] = []
    for key in keys:
        # The pack is read again, as the first read may have failed in transit.
        pack = format_pack.pack_of(key)
        try:
            data = backend.get(key)
            if pack is None or _whole(pack, data):
                continue
            _save(work, format_pack.parse_tail(data, len(data)), data)
            saved.append(key)
        except StoreDamaged:
            work.unread.append(key)
        except (StoreNewer, NotInStore):
            continue
    _take_away(work, saved)


def _whole(pack: str, data: bytes) -> bool:
    """Return whether a pack is intact. Raises StoreNewer."""
    try:
        format_pack.parse(pack, data)
    except StoreDamaged:
        return False
    return True


def _save(work: _Work, index: format_pack.Index, data: bytes) -> None:
    packing = Packing(
        work.store.backend, lambda _info, _rows: None, generation=index.generation + 1,
        foreign=index.foreign,
    )  # fmt: skip
    view = memoryview(data)
    try:
        for name, offset, length, plain, hash_ in index.rows.tolist():
            box = view[offset : offset + length]
            if format_pack.box_hash(box) == hash_:
                packing.add(name, box, plain)
                work.saved += 1
        packing.finish()
        fault("gc: rewritten")
    finally:
        packing.close()


def _take_away(work: _Work, keys: Sequence[str]) -> None:
    for key in keys:
        work.lock.still_ours()
        work.store.backend.delete(key)
        fault("gc: object deleted")
        work.removed.append(key)


def _manifests(work: _Work) -> None:
    """Fetch damaged manifests and wrapped keys from other stores."""
    for one in work.store.manifests():
        try:
            found = manifest.decode(work.store.manifest(one.id), one.id, None)
            wrapped_of(work.store, found)
        except NotInStore:
            continue
        except StoreNewer:
            continue
        except StoreDamaged:
            if any(_copied(work, source, one.id) for source in work.sources):
                work.snapshots.append(one.id)


def _copied(work: _Work, source: Store, id_: str) -> bool:
    try:
        done = copy.copy(source, work.store, id_, work.progress)
    except (NotInStore, StoreDamaged, StoreNewer):
        return False
    work.brought += done.chunks_new
    work.brought_bytes += done.bytes_new
    return True


def _chunks(work: _Work) -> dict[str, int]:
    """Fetch missing chunks. Returns the number still missing, by snapshot."""
    for encrypted in (False, True):
        missing = NameSet(names for _, own, names in _lacking(work) if own is encrypted)
        for source in work.sources:
            if len(missing):
                missing = _brought(work, source, missing, encrypted=encrypted)
    return {id_: len(names) for id_, _, names in _lacking(work)}


def _brought(work: _Work, source: Store, missing: NameSet, *, encrypted: bool) -> NameSet:
    """Fetch missing chunks from one store.

    `encrypted`: whether the chunks are encrypted. Returns the chunks that are still missing.
    """
    with work.store.receiver(encrypted=encrypted) as receiver:
        done = 0
        try:
            for name, box, plain in copy.boxes(source, missing):
                receiver.add(name, box, plain)
                done += len(box)
                work.progress(copied_so_far("repair", done))
        except StoreDamaged:
            pass  # the source does not have all missing chunks
        written = receiver.finish()
    work.brought += written.chunks_new
    work.brought_bytes += written.bytes_new
    there = work.store.catalog.load(work.doubtful).index.has(missing.names)
    return NameSet([missing.names[~there]])


def _lacking(work: _Work) -> Iterator[tuple[str, bool, Names]]:
    """Yield snapshots that lack chunks: ID, whether encrypted, and the missing names."""
    store = work.store
    index = store.catalog.load(work.doubtful).index
    for one in store.manifests():
        try:
            found = manifest.decode(store.manifest(one.id), one.id, None)
        except (NotInStore, StoreDamaged, StoreNewer):
            continue
        names = found.names.array()
        gone = names[~index.has(names)]
        if len(gone):
            yield one.id, found.encrypted, gone
