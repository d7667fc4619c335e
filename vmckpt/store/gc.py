"""Garbage collection: remove objects that no snapshot needs, while writers are running.

The order of reads matters: pending deletions, then locks, then manifests, then packs. A writer
takes its lock, then reads pending deletions, then packs. So if a writer's lock is not seen here,
the writer has either published its snapshot, or will read every pending deletion seen here. The
locks of dead writers are removed before manifests are read. A writer that wakes up later therefore
cannot publish a snapshot.

Packs of which only a part is needed are rewritten. Rewriting requires no key. `gc_plan` decides
what to remove and what to rewrite.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.store import locks
from vmckpt.store import pending_deletion as condemnations
from vmckpt.store.backend.base import Backend
from vmckpt.store.catalog import Listing
from vmckpt.store.chunk_index import Names, NameSet, names_of
from vmckpt.store.fault_injection import fault
from vmckpt.store.format import pack as format_pack
from vmckpt.store.gc_plan import (
    GcDecision,
    GcTerms,
    Loose,
    PackUse,
    Scene,
    Use,
    dead_locks,
    decide,
    use_of,
)
from vmckpt.store.locks import Lock, LockPurpose
from vmckpt.store.pack_writer import Packing
from vmckpt.store.repository import Store
from vmckpt.units import Bytes, Seconds, show_count


def rewrite(
    backend: Backend, homes: Mapping[str, Names], generation: int, chosen: Sequence[str], *,
    foreign: bool,
) -> tuple[str, ...]:  # fmt: skip
    """Copy the needed chunks of the chosen packs to new packs.

    `homes` contains the needed chunks by pack ID. `foreign` is True if the chosen packs are
    foreign. Skips packs that are damaged, of a newer version, or gone. Returns the packs whose
    needed chunks are all durable in new packs. Raises StoreError.
    """
    packing = Packing(backend, lambda _info, _rows: None, generation=generation, foreign=foreign)
    done = []
    try:
        for pack in chosen:
            wanted = {name.tobytes() for name in homes[pack]}
            try:
                boxes = list(boxes_of(backend, pack, wanted))
            except (NotInStore, StoreDamaged, StoreNewer):
                continue
            for name, box, plain in boxes:
                packing.add(name, box, plain)
            done.append(pack)
        packing.finish()
    finally:
        packing.close()
    return tuple(done)


def boxes_of(
    backend: Backend, pack: str, wanted: "set[bytes] | None" = None
) -> Iterator[tuple[bytes, memoryview, int]]:
    """Yield the name, data and plain length of each sealed chunk of a pack. Verifies each hash.

    `wanted` selects chunks by name; None: all chunks. Raises NotInStore, StoreDamaged, StoreNewer,
    StoreError.
    """
    key = format_pack.key_of(pack)
    data = backend.get(key)
    index = format_pack.parse_tail(data, len(data))
    view = memoryview(data)
    for name, offset, length, plain, told in index.rows.tolist():
        if wanted is not None and name not in wanted:
            continue
        box = view[offset : offset + length]
        if format_pack.box_hash(box) != told:
            raise StoreDamaged(
                f"{backend.where}: {key}: chunk {name.hex()[:16]} at offset {offset} is damaged"
            )
        yield name, box, plain


GRACE = Seconds(86400.0)
References = Callable[[bytes], Iterable[bytes] | Names]
"""Returns the names of the chunks that a manifest needs. Raises StoreDamaged or StoreNewer."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a garbage collection did, or, in a dry run, would do."""

    removed: int
    """Number of removed objects."""
    removed_bytes: Bytes
    condemned: int
    condemned_bytes: Bytes
    rewritten: int
    """Number of rewritten packs. Their old versions are marked for deletion."""
    waiting: tuple[str, ...]
    """Why each pending deletion of an earlier collection has to wait."""
    dead_locks: int
    leftovers: int
    missing: int
    """Number of chunks that snapshots need but no pack contains. If not 0, the store is damaged."""
    unreadable: tuple[str, ...]
    """Packs that were kept because they could not be read."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The state of a store, as read by a garbage collection."""

    scene: Scene
    use: Use
    listing: Listing
    gone: int
    """Number of locks that belong to dead processes."""


def collect(
    store: Store,
    references: References,
    *,
    grace: Seconds = GRACE,
    life: Seconds = locks.LIFE,
    dry_run: bool = False,
    progress: Progress = lambda _: None,
) -> Collected:
    """Remove objects marked earlier, rewrite sparse packs, and mark unneeded objects for deletion.

    For `grace` and `life` see `GcTerms`. With `dry_run` nothing is changed. Raises StoreError.
    Raises StoreDamaged or StoreNewer if a manifest cannot be read. In that case only locks of dead
    processes are removed, because it is not known which chunks the manifest needs.
    """
    terms = GcTerms(grace=grace, life=life)
    if dry_run:
        found = _look(store, references, terms, Seconds(time.time()), progress)
        decision = decide(found.scene, terms)
        return _told(found, decision, decision.condemn, decision.rewrite)
    lock = take_lock(store.backend, life)
    try:
        fault("gc: locked")
        found = _look(store, references, terms, lock.now(), progress, bury=True)
        decision = decide(found.scene, terms)
        fault("gc: decided")
        return _carry_out(store, lock, found, decision, progress)
    finally:
        lock.release()


def live_names(store: Store, references: References) -> NameSet:
    """Return the names of all chunks that snapshots need.

    Raises StoreError. StoreDamaged and StoreNewer name the manifest that cannot be read.
    """
    return NameSet(names for _, names in named_by(store, references))


def named_by(store: Store, references: References) -> Iterable[tuple[str, Names]]:
    """Yield each snapshot's ID with the names of the chunks that the snapshot needs.

    Raises StoreError. StoreDamaged and StoreNewer name the manifest that cannot be read.
    """
    for one in store.manifests():
        try:
            yield one.id, names_of(references(store.manifest(one.id)))
        except NotInStore:
            continue
        except (StoreDamaged, StoreNewer) as exc:
            raise type(exc)(
                f"{store.backend.where}: snapshots/{one.id}: {exc.message}",
                hint=exc.hint,
            ) from exc


def take_lock(backend: Backend, life: Seconds) -> Lock:
    """Take the lock for garbage collection or repair.

    Another process's lock is considered dead if it was not refreshed for `life` seconds. Raises
    StoreError if another process holds the lock.
    """
    lock = Lock(backend, LockPurpose.GC)
    if lock.take():
        return lock
    probe = Lock(backend, LockPurpose.DELETE, about="")
    probe.take()
    try:
        now = probe.now()
        for one in locks.list_locks(backend):
            if one.key == locks.GC and one.alive(now, life):
                raise StoreError(
                    f"{backend.where}: {one.owner} is already running a garbage collection or"
                    " repair",
                    hint=f"wait; if that process is dead, its lock expires after {life:.0f} s",
                )
        backend.delete(locks.GC)
    finally:
        probe.release()
    if not lock.take():
        raise StoreError(
            f"{backend.where}: another process is already running a garbage collection or repair",
            hint="try again later",
        )
    return lock


def _look(
    store: Store, references: References, terms: GcTerms, now: Seconds, progress: Progress,
    *, bury: bool = False,
) -> _Found:  # fmt: skip
    """Read a store, in the order that the module's docstring gives.

    With `bury`, also removes the locks of dead processes.
    """
    judged = condemnations.load(store.backend)
    at_work = list(locks.list_locks(store.backend))
    gone = dead_locks(at_work, now, terms)
    for key in gone if bury else ():
        store.backend.delete(key)
        fault("gc: lock removed")
    progress("reading manifests")
    live = live_names(store, references)
    there = {one.id for one in store.manifests()}
    loose = [
        Loose(one.key, one.modified_at)
        for prefix in ("wraps/", "pins/", "verified/")
        for one in store.backend.keys(prefix)
        if one.key.rpartition("/")[2] not in there
    ]
    progress("reading pack indexes")
    listing = store.catalog.load()
    dead = frozenset(pack for one in judged for pack in one.packs)
    use = use_of(listing.index, dead, live)
    leftovers = {one.key: one.modified_at for one in store.backend.leftovers()}
    uses = _uses(listing, use, dead)
    scene = Scene(
        packs=uses, condemned=judged, locks=at_work, loose=loose, leftovers=leftovers, now=now
    )
    return _Found(scene, use, listing, len(gone))


def _uses(listing: Listing, use: Use, dead: "frozenset[str]") -> list[PackUse]:
    return [
        PackUse(
            pack, format_pack.key_of(pack), info.size, listing.stored[pack].modified_at,
            info.generation,
            use.needed.get(pack, 0), pack in dead, info.foreign,
        )
        for pack, info in sorted(listing.index.packs().items())
    ]  # fmt: skip


def _carry_out(
    store: Store, lock: Lock, found: _Found, decision: GcDecision, progress: Progress
) -> Collected:
    backend = store.backend
    for token, keys in decision.remove.items():
        progress(f"removing {show_count(len(keys), 'object')}")
        for key in keys:
            lock.still_ours()
            _remove(backend, key)
            fault("gc: object deleted")
        backend.delete(f"condemned/{token}")
        fault("gc: condemnation closed")
    old: tuple[str, ...] = ()
    if decision.rewrite:
        progress(f"rewriting {show_count(len(decision.rewrite), 'pack')}")
        there = {pack.id: pack for pack in found.scene.packs}
        generation = 1 + max(there[pack].generation for pack in decision.rewrite)
        for foreign in (False, True):
            chosen = [pack for pack in decision.rewrite if there[pack].foreign is foreign]
            old += rewrite(backend, found.use.homes, generation, chosen, foreign=foreign)
        fault("gc: rewritten")
    condemn = (*decision.condemn, *(format_pack.key_of(pack) for pack in old))
    if condemn:
        lock.still_ours()
        condemnations.write(backend, condemn)
        fault("gc: condemned")
    for name in decision.clear:
        backend.clear(name)
        fault("gc: leftover removed")
    return _told(found, decision, condemn, old)


def _remove(backend: Backend, key: str) -> None:
    """Remove an object, unless its snapshot has been published in the meantime.

    A pack's key is unique: writing the same chunks again creates a pack with a different key. All
    other objects are named after their snapshot, so a writer may write them again at any moment.
    Therefore this function checks for the manifest both before and after the removal.
    `Store.publish` checks in the opposite order.
    """
    if key.startswith("packs/"):
        backend.delete(key)
        return
    manifest = f"snapshots/{key.rpartition('/')[2]}"
    if any(backend.keys(manifest)):
        return
    with suppress(NotInStore):
        content = backend.get(key)
        backend.delete(key)
        fault("gc: to be looked for again")
        if any(backend.keys(manifest)):
            backend.put(key, content)


def _told(
    found: _Found, decision: GcDecision, condemn: tuple[str, ...], rewritten: tuple[str, ...]
) -> Collected:
    sizes = {pack.key: pack.size for pack in found.scene.packs}
    removed = [key for keys in decision.remove.values() for key in keys]
    return Collected(
        removed=len(removed),
        removed_bytes=Bytes(sum(sizes.get(key, 0) for key in removed)),
        condemned=len(condemn),
        condemned_bytes=Bytes(sum(sizes.get(key, 0) for key in condemn)),
        rewritten=len(rewritten),
        waiting=tuple(decision.waiting.values()),
        dead_locks=found.gone,
        leftovers=len(decision.clear),
        missing=len(found.use.missing),
        unreadable=tuple(found.listing.unreadable),
    )
