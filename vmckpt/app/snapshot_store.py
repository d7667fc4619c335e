"""Show, verify, prune, copy and browse the snapshots in stores, and manage their keys."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from vmckpt.app import controller, permission
from vmckpt.app.stores import keyring, open_place
from vmckpt.errors import BadInput, KeyRefused, StoreError
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity
from vmckpt.policy.model import Keep
from vmckpt.snapshot import archive, catalog, diff, rekey
from vmckpt.snapshot import copy as snapshot_copy
from vmckpt.snapshot import prune as snapshot_prune
from vmckpt.snapshot.browse import Browse
from vmckpt.snapshot.catalog import Found, Identity, Looked, Progress
from vmckpt.snapshot.copy import Moved
from vmckpt.snapshot.diff import RegionDiff
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.rules import GroupCompleteness
from vmckpt.snapshot.prune import PruneDecision
from vmckpt.snapshot.rekey import Rotated
from vmckpt.snapshot.verify import repair as verify_repair
from vmckpt.snapshot.verify import results
from vmckpt.snapshot.verify import verify as verify_verify
from vmckpt.snapshot.verify.repair import Repaired
from vmckpt.snapshot.verify.results import UNKNOWN, VerifySummary
from vmckpt.snapshot.verify.verify import Depth, Proved
from vmckpt.store import gc as collecting
from vmckpt.store import snapshot_list
from vmckpt.store.format.metadata import Public
from vmckpt.store.format.private_part import Private
from vmckpt.store.gc import Collected
from vmckpt.store.keys import identity as keys_identity
from vmckpt.store.keys import keyring as keys_keyring
from vmckpt.store.keys.keyring import Named
from vmckpt.store.repository import Store
from vmckpt.store.tiered_reader import TieredReader
from vmckpt.units import Seconds

_LOCAL_TIME = Path("/etc/localtime")


def open_store(inventory: Inventory, name: str | None) -> Store:
    """Open a store of the inventory; the first store if `name` is None.

    Raises InventoryError, BadInput, NotInStore, StoreNewer, StoreError.
    """
    return open_place(inventory.store(name))


def located(inventory: Inventory, store: str | None, word: str) -> Found:
    """Find a snapshot in the named store, or in all stores if `store` is None.

    Raises InventoryError, NotInStore, StoreError, BadInput.
    """
    places = [inventory.store(store)] if store is not None else list(inventory.stores.values())
    return catalog.find_anywhere(places or [inventory.store()], open_place, word)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """A snapshot in the list of a store."""

    id: str
    public: Public | None
    """The snapshot's public metadata; None: the snapshot cannot be read."""
    pinned: bool
    trusted: bool
    """Whether the snapshot was signed by a writer that this controller trusts."""
    wrong: str | None
    """Why the snapshot cannot be read; None if it can be read."""
    group: GroupCompleteness | None = None
    """The snapshot's group, and how many members of the group the store has; None: no group."""
    verdict: VerifySummary = UNKNOWN
    """Verification results of the snapshot."""


async def listed(
    inventory: Inventory, store: str | None, guest: str | None
) -> Sequence[SnapshotRow]:
    """List the snapshots of a store, the oldest first; unreadable snapshots come last.

    `guest`: name or UUID; snapshots known to be of other guests are omitted. Raises InventoryError,
    NotInStore, StoreError, BadInput.
    """
    return await asyncio.to_thread(listing, inventory, store, guest)


def listing(
    inventory: Inventory, name: str | None, guest: str | None = None
) -> Sequence[SnapshotRow]:
    """List the snapshots of a store, blocking; see `listed`.

    `name`: the store's name; None: the default store. `guest`: only snapshots of the guest with
    this name or UUID. Raises BadInput, InventoryError, KeyRefused, StoreError.
    """
    store = open_place(inventory.store(name))
    pins, trusted = store.pins(), keyring().trusted()
    found = []
    everything = []
    checks = results.verdicts(store, trusted)
    for id_, public in snapshot_list.proved(store).items():
        if not isinstance(public, Public):
            wrong = str(public)
            found.append(SnapshotRow(id=id_, public=None, pinned=False, trusted=False, wrong=wrong))
            continue
        everything.append(public)
        if guest is None or guest in (public.guest, public.guest_uuid):
            signed = bytes.fromhex(public.signer) in trusted
            found.append(
                SnapshotRow(
                    id=id_,
                    public=public,
                    pinned=id_ in pins,
                    trusted=signed,
                    wrong=None,
                    verdict=checks.get(id_, UNKNOWN),
                )
            )
    groups = rules.standing(everything)
    found = [
        replace(one, group=groups[one.public.group])
        if one.public is not None and one.public.group is not None
        else one
        for one in found
    ]
    return sorted(found, key=lambda one: (one.public is None, one.public and one.public.made_at))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A snapshot, the stores that have it, and a function that opens the snapshot."""

    looked: Looked
    stores: tuple[str, ...]
    """Names of the stores that have the snapshot, which was read from the first store."""
    verdict: VerifySummary
    """Verification results of the snapshot, as recorded in the first store."""
    admins: tuple[Named, ...]
    """The administrators known to this controller, for the names of the snapshot's recipients."""
    open: Callable[[], Private]
    """Reads the private part. Raises KeyRefused, StoreError."""


def show(inventory: Inventory, store: str | None, word: str, identity: Identity | None) -> Shown:
    """Inspect a snapshot. Raises InventoryError, NotInStore, BadInput, StoreError."""
    found = located(inventory, store, word)
    opened = found.store
    ring = keyring()
    trusted = ring.trusted()
    looked = catalog.inspect(opened, found.id, trusted)
    return Shown(
        looked=looked,
        stores=tuple(one.place.name for one in found.tiers),
        verdict=results.verdict(results.load(opened, found.id, trusted)),
        admins=ring.admins(),
        open=lambda: catalog.opened(opened, looked, identity, trusted)[0],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The differences between two snapshots; the figures are upper bounds."""

    before: Public
    after: Public
    regions: tuple[RegionDiff, ...]

    @property
    def changed(self) -> int:
        """Number of changed bytes."""
        return sum(one.size for one in self.regions)

    @property
    def follows(self) -> bool:
        """Whether the newer snapshot is based on the older one; if so, figures are mostly exact."""
        return self.after.parent == self.before.id

    def as_json(self) -> dict[str, Any]:
        return {
            "before": self.before.id,
            "after": self.after.id,
            "follows": self.follows,
            "changed_bytes": self.changed,
            "regions": [
                {
                    "name": one.name,
                    "kind": str(one.kind),
                    "before_bytes": one.before,
                    "after_bytes": one.after,
                    "changed_units": one.changed,
                    "changed_bytes": one.size,
                    "changed_mib": round(one.mib, 3),
                    "zeroed_units": one.zeroed,
                    "filled_units": one.filled,
                }
                for one in self.regions
            ],
        }


def compare(
    inventory: Inventory,
    store: str | None,
    words: tuple[str, str],
    identity: Identity | None,
) -> Compared:
    """Compare two snapshots of a store. `words`: IDs or names, the older snapshot first.

    `store`: see `pin`. Raises NotInStore, BadInput, KeyRefused, StoreError.
    """
    opened = open_store(inventory, store)
    trusted = keyring().trusted()
    before, after = (catalog.inspect(opened, catalog.find(opened, word), trusted) for word in words)
    old, _ = catalog.opened(opened, before, identity, trusted)
    new, _ = catalog.opened(opened, after, identity, trusted)
    return Compared(before=before.public, after=after.public, regions=diff.compare(old, new))


def verify(
    inventory: Inventory,
    store: str | None,
    words: Sequence[str],
    depth: Depth,
    *,
    identity: Identity | None,
    progress: Progress,
    warn: Callable[[str], None] = lambda _: None,
) -> Proved:
    """Verify snapshots, or a complete store if `words` is empty; record the results in the store.

    `words`: IDs, ID prefixes or names. Damage is reported in the result, not raised. If `store` is
    None, the store in which the first snapshot is found is used; without snapshots, the default
    store. In a read-only inventory, the results are not recorded; if they cannot be recorded,
    `warn` is called. Raises NotInStore, StoreError, KeyRefused, BadInput.
    """
    if store is None and words:
        opened = located(inventory, None, words[0]).store
    else:
        opened = open_store(inventory, store)
    ids = tuple(dict.fromkeys(catalog.find(opened, word) for word in words))
    ring = keyring()
    found = verify_verify.prove(
        opened, ids, depth, trusted=ring.trusted(), identity=identity, progress=progress
    )
    if not inventory.read_only:
        try:
            by = controller_identity.asked_by()
            results.write_down(opened, found, ring.signing(), by=by, at=time.time())
        except StoreError as exc:
            warn(f"the result was not recorded: {exc}")
    return found


def repair(
    inventory: Inventory, store: str | None, sources: Sequence[str], progress: Progress
) -> Repaired:
    """Repair a store with data from the stores named in `sources`.

    `store`: see `pin`. Raises ReadOnly, BadInput, StoreError.
    """
    permission.require(inventory, "snapshot verify --repair")
    opened = open_store(inventory, store)
    others = [open_store(inventory, one) for one in dict.fromkeys(sources)]
    if any(one.id == opened.id for one in others):
        raise BadInput(
            "a store cannot be repaired from itself", hint="name another store with --from"
        )
    return verify_repair.repair(opened, others, progress)


def pin(inventory: Inventory, store: str | None, word: str, why: str) -> str:
    """Protect a snapshot from deletion. Returns its ID.

    `store`: the store's name; None: the default store. `word`: the snapshot's ID, a prefix of the
    ID, or its name; `why`: the reason, which is stored with the pin. Raises ReadOnly, NotInStore,
    StoreError, InventoryError, BadInput.
    """
    permission.require(inventory, "snapshot pin", names=[word])
    opened = open_store(inventory, store)
    id_ = catalog.find(opened, word)
    opened.pin(id_, why)
    return id_


def unpin(inventory: Inventory, store: str | None, word: str) -> str:
    """Remove a snapshot's pin. Returns its ID.

    `store`, `word`: see `pin`. Raises ReadOnly, NotInStore, StoreError, InventoryError, BadInput.
    """
    permission.require(inventory, "snapshot unpin", names=[word])
    opened = open_store(inventory, store)
    id_ = catalog.find(opened, word)
    opened.unpin(id_)
    return id_


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """Snapshots to delete; nothing is deleted before `delete` is iterated."""

    store: Store
    ids: tuple[str, ...]
    known: dict[str, Public]
    """Public metadata of the snapshots that can be read, by ID."""

    def delete(self) -> Iterator[str]:
        """Delete the snapshots, and yield the ID of each after its deletion.

        Raises StoreError, and BadInput if a snapshot is pinned.
        """
        for id_ in self.ids:
            self.store.delete(id_)
            yield id_


def doomed(inventory: Inventory, store: str | None, words: Sequence[str]) -> DeletionPlan:
    """Find the snapshots to delete. `store`, `words`: see `pin`.

    Raises ReadOnly, NotInStore, StoreError, and BadInput, for example if a snapshot is pinned.
    """
    permission.require(inventory, "snapshot delete", names=words)
    opened = open_store(inventory, store)
    ids = tuple(dict.fromkeys(catalog.find(opened, word) for word in words))
    for id_ in sorted(opened.pins().intersection(ids)):
        raise BadInput(
            f"snapshot {id_} is pinned; nothing was deleted",
            hint=f"run vmckpt snapshot unpin {id_}",
        )
    return DeletionPlan(store=opened, ids=ids, known=catalog.readable(opened, ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The prune decision on each snapshot; nothing is deleted before `carry_out` is iterated."""

    store: Store
    schedule: str
    fates: tuple[PruneDecision, ...]

    def carry_out(self) -> Iterator[PruneDecision]:
        """Delete the snapshots that are not kept, and yield the decision on each.

        Raises StoreError.
        """
        return snapshot_prune.carry_out(self.store, self.fates)


def prune(
    inventory: Inventory, store: str | None, keep: Keep, schedule: str | None, *, dry_run: bool
) -> Pruning:
    """Apply retention rules to a schedule's snapshots, without deleting any.

    `store`: see `pin`. `schedule`: name of the schedule; None: the only schedule in the store.
    `dry_run`: allowed in a read-only inventory. Raises ReadOnly, BadInput, StoreError.
    """
    if not dry_run:
        permission.require(inventory, "snapshot prune")
    opened = open_store(inventory, store)
    found = snapshot_prune.survey(opened, keyring().trusted())
    name = snapshot_prune.schedule_of(found, schedule, opened.backend.where)
    fates = snapshot_prune.plan(found, keep, schedule=name, now=time.time(), zone=local_zone())
    return Pruning(store=opened, schedule=name, fates=fates)


def local_zone() -> tzinfo:
    """Return this machine's time zone, with daylight saving time; UTC if it cannot be read."""
    named = os.environ.get("TZ", "").lstrip(":")
    path = _LOCAL_TIME
    if named.startswith("/"):
        path = Path(named)
    elif named:
        with suppress(OSError, ValueError, KeyError):  # ZoneInfoNotFoundError is a KeyError
            return ZoneInfo(named)
    with suppress(OSError, ValueError), path.open("rb") as file:
        return ZoneInfo.from_file(file, key="local")
    return UTC


def collect(
    inventory: Inventory,
    store: str | None,
    *,
    grace: Seconds,
    dry_run: bool,
    say: Callable[[str], None],
) -> tuple[str, Collected]:
    """Remove data that no snapshot needs.

    `store`: see `pin`. `grace`: age, in seconds, below which unused data is kept. `dry_run`: change
    nothing. `say` is called with lines on the progress. Returns the store's location and the
    result. Raises ReadOnly, BadInput, StoreError, InventoryError.
    """
    if not dry_run:
        permission.require(inventory, "snapshot gc")
    opened = open_store(inventory, store)
    done = collecting.collect(
        opened, catalog.references, grace=grace, dry_run=dry_run, progress=say
    )
    return opened.backend.where, done


def copy(
    inventory: Inventory, words: Sequence[str], from_: str | None, to: str, progress: Progress
) -> Iterator[Moved]:
    """Copy snapshots into the store `to`, and yield the result of each.

    `words`: IDs, ID prefixes or names, in the store `from_`; None: the default store. Raises
    ReadOnly, NotInStore, BadInput, StoreError.
    """
    permission.require(inventory, "snapshot copy", names=words)
    source, target = open_store(inventory, from_), open_store(inventory, to)
    ids = dict.fromkeys(catalog.find(source, word) for word in words)
    return (snapshot_copy.copy(source, target, id_, progress) for id_ in ids)


def export(
    inventory: Inventory, store: str | None, word: str, path: Path, progress: Progress
) -> Moved:
    """Write a snapshot (see `pin`) to a new file. Raises NotInStore, BadInput, StoreError."""
    permission.require_role(inventory, "snapshot export", names=[word])
    opened = open_store(inventory, store)
    return archive.export(opened, catalog.find(opened, word), path, progress)


def import_(inventory: Inventory, store: str | None, path: Path, progress: Progress) -> Moved:
    """Import the snapshot in a file into a store. `store`: see `pin`.

    Raises ReadOnly, BadInput, KeyRefused if its writer is not trusted, StoreError.
    """
    permission.require(inventory, "snapshot import")
    return archive.import_(open_store(inventory, store), path, keyring().trusted(), progress)


def new_identity(path: Path, passphrase: str | None) -> bytes:
    """Create an administrator's identity in a new file. Returns its public key.

    Raises ReadOnly, NotPermitted, KeyRefused.
    """
    permission.require_if_known(controller.load_inventory, "snapshot keys new")
    return keys_identity.create(path, passphrase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The public part of this controller's keys."""

    writer: Named | None
    """The key that signs this controller's snapshots; None if it has not signed anything yet."""
    domain: str | None
    admins: tuple[Named, ...]
    writers: tuple[Named, ...]


def keys() -> Keys:
    """Return this controller's keys: recipients, its own signing key, and trusted writers.

    Raises KeyRefused.
    """
    ring = keyring()
    writers = ring.writers()
    others = {one.key for one in writers}
    return Keys(
        # ring.writer() would create a missing key, but a query must not change anything.
        writer=ring.writer() if ring.trusted() - others else None,
        domain=ring.domain(),
        admins=ring.admins(),
        writers=writers,
    )


def add_key(name: str, text: str) -> Named:
    """Encrypt new snapshots for an additional administrator.

    Raises ReadOnly, NotPermitted, KeyRefused.

    `name`: a name for the key; `text`: the public key in text form.
    """
    permission.require_if_known(controller.load_inventory, "snapshot keys add", names=[name])
    return keyring().add_admin(name, text)


def remove_key(name: str) -> None:
    """Stop encrypting new snapshots for an administrator.

    Raises ReadOnly, NotPermitted, KeyRefused.
    """
    permission.require_if_known(controller.load_inventory, "snapshot keys remove", names=[name])
    keyring().remove_admin(name)


def trust(name: str, text: str) -> Named:
    """Trust the snapshots that another writer signed. Raises ReadOnly, NotPermitted, KeyRefused.

    `name`: a name for the writer; `text`: its public key in text form.
    """
    permission.require_if_known(controller.load_inventory, "snapshot keys trust", names=[name])
    return keyring().trust(name, text)


def distrust(name: str) -> None:
    """Stop trusting a writer. Raises ReadOnly, NotPermitted, KeyRefused."""
    permission.require_if_known(controller.load_inventory, "snapshot keys distrust", names=[name])
    keyring().distrust(name)


def export_salt(path: Path, passphrase: str | None) -> str:
    """Write the domain's salt to a new file.

    Returns the domain's ID. Raises ReadOnly, NotPermitted, KeyRefused.
    """
    permission.require_if_known(controller.load_inventory, "snapshot keys export-salt")
    return keys_keyring.write(keyring(), path, passphrase)


def import_salt(path: Path, passphrase: keys_identity.Passphrase | None) -> str:
    """Join the domain whose salt is in a file.

    Returns the domain's ID. Raises ReadOnly, NotPermitted, KeyRefused.
    """
    permission.require_if_known(controller.load_inventory, "snapshot keys import-salt")
    return keys_keyring.load(keyring(), path, passphrase)


def heirs(drop: str | None) -> tuple[Named, ...]:
    """Return the administrators whose keys open the snapshots after a rotation.

    `drop`: name of the key to remove, if any. Raises KeyRefused if there is no such key, or if no
    key would be left.
    """
    admins = keyring().admins()
    if drop is not None and drop not in {one.name for one in admins}:
        raise KeyRefused(
            f"no key named {drop[:80]!r}",
            hint="if the key is already removed, omit --drop; see vmckpt snapshot keys list",
        )
    left = tuple(one for one in admins if one.name != drop)
    if not left:
        raise KeyRefused(
            "no administrator's key would be left to read the snapshots",
            hint="add another key with vmckpt snapshot keys add NAME KEY",
        )
    return left


def rotate(
    inventory: Inventory,
    stores: Sequence[str],
    identity: Identity,
    drop: str | None,
    *,
    dry_run: bool,
    progress: Callable[[int, int], None],
) -> Iterator[Rotated]:
    """Rewrap the data keys of all snapshots in the named stores, or in all stores.

    `identity`: opens the data keys. `drop`: name of an administrator's key to remove, if any.
    `dry_run`: change nothing. `progress` is called with the number of snapshots done and the total.
    Yields the result of each store. Raises ReadOnly, BadInput, KeyRefused, StoreError,
    InventoryError.
    """
    if not dry_run:
        permission.require(inventory, "snapshot keys rotate")
    left = heirs(drop)
    key, trusted = identity(), keyring().trusted()
    opened = [open_store(inventory, name) for name in stores or inventory.stores]
    if drop is not None and not dry_run:
        # The key is removed first, so that snapshots taken meanwhile are not encrypted for it.
        keyring().remove_admin(drop)
    admins = [one.key for one in left]
    for store in opened:
        yield rekey.rotate(store, key, admins, trusted, dry_run=dry_run, progress=progress)


@contextmanager
def opened(
    inventory: Inventory, store: str | None, snapshot: str, identity: Identity | None
) -> Iterator[Browse]:
    """Open a snapshot of a trusted writer for browsing, until the block ends.

    The snapshot is searched for in the named store, or in all stores if `store` is None. Raises
    NotInStore, StoreError, KeyRefused, BadInput.
    """
    permission.require_role(inventory, "snapshot open", names=[snapshot])
    found = located(inventory, store, snapshot)
    trusted = keyring().trusted()
    looked = catalog.inspect(found.store, found.id, trusted)
    private, sealing = catalog.opened(found.store, looked, identity, trusted)
    with TieredReader([one.store for one in found.tiers], sealing) as reader:
        yield Browse(looked.public, private, reader)
