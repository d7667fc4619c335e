"""Removes what no snapshot needs any more, beside writers that are at work. See `reachability`.

The order in which things are looked at matters: condemnations, then locks, then manifests, then
packs. A writer takes its lock, then looks at condemnations, then at packs. So whoever is not seen
here with a lock has published what it will, or will know of every condemnation seen here. The locks
of the dead are removed before manifests are looked at: who wakes later publishes nothing.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.store import condemned as condemnations
from vmckpt.store import locks, packs
from vmckpt.store.backend import Backend
from vmckpt.store.catalog import Listing
from vmckpt.store.faults import fault
from vmckpt.store.homes import Use, use_of
from vmckpt.store.index import Names, NameSet, names_of
from vmckpt.store.locks import Lock, Work
from vmckpt.store.reachability import (
    Decision,
    Loose,
    PackUse,
    Scene,
    Terms,
    dead_locks,
    decide,
)
from vmckpt.store.rewrite import rewrite
from vmckpt.store.store import Store
from vmckpt.units import Bytes, Seconds

GRACE = Seconds(86400.0)
References = Callable[[bytes], Iterable[bytes] | Names]
"""What a manifest names. Raises StoreDamaged or StoreNewer for what is none."""
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection did, or would do."""

    removed: int
    """Objects."""
    removed_bytes: Bytes
    condemned: int
    condemned_bytes: Bytes
    rewritten: int
    """Packs that were put into new ones; they are condemned."""
    waiting: tuple[str, ...]
    """Why earlier condemnations were left for later."""
    dead_locks: int
    leftovers: int
    missing: int
    """Chunks that snapshots name and no pack has: the store is damaged."""
    unreadable: tuple[str, ...]
    """Packs that were left alone because they cannot be read."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A store as it was looked at."""

    scene: Scene
    use: Use
    listing: Listing
    gone: int
    """Locks of those that are gone."""


def collect(
    store: Store,
    references: References,
    *,
    grace: Seconds = GRACE,
    life: Seconds = locks.LIFE,
    dry_run: bool = False,
    progress: Progress = lambda _: None,
) -> Collected:
    """Carry out earlier condemnations, rewrite sparse packs, condemn what nobody needs.

    Raises StoreError; and StoreDamaged or StoreNewer if a manifest cannot be read: then nobody
    knows what it needs, and nothing is removed.
    """
    terms = Terms(grace=grace, life=life)
    if dry_run:
        found = _look(store, references, terms, Seconds(time.time()), progress)
        decision = decide(found.scene, terms)
        return _told(found, decision, decision.condemn, decision.rewrite)
    lock = taken(store.backend, life)
    try:
        fault("gc: locked")
        found = _look(store, references, terms, lock.now(), progress, bury=True)
        decision = decide(found.scene, terms)
        fault("gc: decided")
        return _carry_out(store, lock, found, decision, progress)
    finally:
        lock.release()


def live_names(store: Store, references: References) -> NameSet:
    """What all manifests name. Raises StoreDamaged, StoreNewer, naming the manifest."""
    return NameSet(names for _, names in named_by(store, references))


def named_by(store: Store, references: References) -> Iterable[tuple[str, Names]]:
    """What each manifest names, by snapshot."""
    for one in store.manifests():
        try:
            yield one.id, names_of(references(store.manifest(one.id)))
        except NotInStore:
            continue
        except (StoreDamaged, StoreNewer) as exc:
            raise type(exc)(
                f"{store.backend.where}: snapshots/{one.id}: {exc.message}",
                mend=exc.mend or "nothing was removed; vmckpt snapshot verify tells more",
            ) from exc


def taken(backend: Backend, life: Seconds) -> Lock:
    """The lock of who collects, or repairs. Raises StoreError if somebody else does."""
    lock = Lock(backend, Work.GC)
    if lock.take():
        return lock
    probe = Lock(backend, Work.DELETE, about="")
    probe.take()
    try:
        now = probe.now()
        for one in locks.seen(backend):
            if one.key == locks.GC and one.alive(now, life):
                raise StoreError(
                    f"{backend.where}: {one.owner} is collecting already",
                    mend=f"wait; if it is gone, its lock is void after {life:.0f} s",
                )
        backend.delete(locks.GC)
    finally:
        probe.release()
    if not lock.take():
        raise StoreError(f"{backend.where}: somebody else is collecting", mend="try again later")
    return lock


def _look(
    store: Store, references: References, terms: Terms, now: Seconds, progress: Progress,
    *, bury: bool = False,
) -> _Found:  # fmt: skip
    """`bury`: remove the locks of those that are dead."""
    judged = condemnations.load(store.backend)
    at_work = list(locks.seen(store.backend))
    gone = dead_locks(at_work, now, terms)
    for key in gone if bury else ():
        store.backend.delete(key)
        fault("gc: lock removed")
    progress("reading what snapshots name")
    live = live_names(store, references)
    there = {one.id for one in store.manifests()}
    loose = [
        Loose(one.key, one.modified_at)
        for prefix in ("wraps/", "pins/", "verified/")
        for one in store.backend.keys(prefix)
        if one.key.rpartition("/")[2] not in there
    ]
    progress("reading what packs hold")
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
            pack, packs.key_of(pack), info.size, listing.stored[pack].modified_at, info.generation,
            use.needed.get(pack, 0), pack in dead, info.foreign,
        )
        for pack, info in sorted(listing.index.packs().items())
    ]  # fmt: skip


def _carry_out(
    store: Store, lock: Lock, found: _Found, decision: Decision, progress: Progress
) -> Collected:
    backend = store.backend
    for token, keys in decision.remove.items():
        progress(f"removing {len(keys)} objects")
        for key in keys:
            lock.still_ours()
            _remove(backend, key)
            fault("gc: object deleted")
        backend.delete(f"condemned/{token}")
        fault("gc: condemnation closed")
    old: tuple[str, ...] = ()
    if decision.rewrite:
        progress(f"rewriting {len(decision.rewrite)} packs")
        there = {pack.id: pack for pack in found.scene.packs}
        generation = 1 + max(there[pack].generation for pack in decision.rewrite)
        for foreign in (False, True):
            chosen = [pack for pack in decision.rewrite if there[pack].foreign is foreign]
            old += rewrite(backend, found.use.homes, generation, chosen, foreign=foreign)
        fault("gc: rewritten")
    condemn = (*decision.condemn, *(packs.key_of(pack) for pack in old))
    if condemn:
        lock.still_ours()
        condemnations.write(backend, condemn)
        fault("gc: condemned")
    for name in decision.clear:
        backend.clear(name)
        fault("gc: leftover removed")
    return _told(found, decision, condemn, old)


def _remove(backend: Backend, key: str) -> None:
    """Remove an object, unless its snapshot has been published since.

    The key of a pack is random, and whoever writes that pack anew writes another one. What belongs
    to a snapshot has the snapshot's key: a writer may put it there again at any moment. So its
    manifest is looked for before and after; `Store.publish` looks in the other order, for its part.
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
    found: _Found, decision: Decision, condemn: tuple[str, ...], rewritten: tuple[str, ...]
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
