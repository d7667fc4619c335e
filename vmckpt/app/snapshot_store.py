"""What is in snapshot stores: show, verify, prune, copy, browse, and their keys."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, tzinfo
from functools import cache
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from vmckpt import inventory as inventories
from vmckpt.app.snapshots import keyring, open_place
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
from vmckpt.snapshot.prune import PruneDecision
from vmckpt.snapshot.rekey import Rotated
from vmckpt.snapshot.verify import repair as verify_repair
from vmckpt.snapshot.verify import results
from vmckpt.snapshot.verify import verify as verify_verify
from vmckpt.snapshot.verify.repair import Repaired
from vmckpt.snapshot.verify.results import VerifySummary
from vmckpt.snapshot.verify.verify import Depth, Proved
from vmckpt.store import gc as collecting
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
    """A store of the inventory. Raises InventoryError, NotInStore, StoreNewer, StoreError."""
    return open_place(inventory.store(name))


def located(inventory: Inventory, store: str | None, word: str) -> Found:
    """A snapshot in the store of that name, or wherever it is. Raises NotInStore, StoreError."""
    places = [inventory.store(store)] if store is not None else list(inventory.stores.values())
    return catalog.find_anywhere(places or [inventory.store()], open_place, word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A snapshot, and what opens it."""

    looked: Looked
    stores: tuple[str, ...]
    """Those that have it, the one that was read first."""
    verdict: VerifySummary
    """What checks of it found there."""
    admins: tuple[Named, ...]
    """Whose names are known here."""
    open: Callable[[], Private]
    """Reads the private part. Raises KeyRefused, StoreError."""


def show(inventory: Inventory, store: str | None, word: str, identity: Identity | None) -> Shown:
    """Look at a snapshot. Raises NotInStore, BadInput, StoreError."""
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
    """What changed between two snapshots, at most."""

    before: Public
    after: Public
    regions: tuple[RegionDiff, ...]

    @property
    def changed(self) -> int:
        """Bytes."""
        return sum(one.size for one in self.regions)

    @property
    def follows(self) -> bool:
        """The newer one was made from the older: then figures are mostly exact."""
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
    """What changed from the first to the second. Raises NotInStore, BadInput, StoreError."""
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
    """Prove some snapshots, or all of a store, and write down what was found.

    What is wrong is told, not raised. Without a store's name, it is the one that the first of the
    snapshots is found in.
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
            warn(f"what was found is not written down: {exc}")
    return found


def repair(
    inventory: Inventory, store: str | None, sources: Sequence[str], progress: Progress
) -> Repaired:
    """Mend a store, with what others have of it. Raises ReadOnly, BadInput, StoreError."""
    inventory.may_act()
    opened = open_store(inventory, store)
    others = [open_store(inventory, one) for one in dict.fromkeys(sources)]
    if any(one.id == opened.id for one in others):
        raise BadInput("a store cannot be mended from itself", hint="name another one with --from")
    return verify_repair.repair(opened, others, progress)


def pin(inventory: Inventory, store: str | None, word: str, why: str) -> str:
    """Keep a snapshot from being deleted; its id. Raises NotInStore, StoreError."""
    inventory.may_act()
    opened = open_store(inventory, store)
    id_ = catalog.find(opened, word)
    opened.pin(id_, why)
    return id_


def unpin(inventory: Inventory, store: str | None, word: str) -> str:
    """Let a snapshot be deleted again; its id. Raises NotInStore, StoreError."""
    inventory.may_act()
    opened = open_store(inventory, store)
    id_ = catalog.find(opened, word)
    opened.unpin(id_)
    return id_


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionPlan:
    """Snapshots that are to be deleted."""

    store: Store
    ids: tuple[str, ...]
    known: dict[str, Public]
    """What those tell of themselves that can be read."""

    def delete(self) -> Iterator[str]:
        """Delete them; tells the id of each. Raises BadInput if one is pinned, StoreError."""
        for id_ in self.ids:
            self.store.delete(id_)
            yield id_


def doomed(inventory: Inventory, store: str | None, words: Sequence[str]) -> DeletionPlan:
    """Find what is to be deleted. Raises ReadOnly, NotInStore, BadInput, also if one is pinned."""
    inventory.may_act()
    opened = open_store(inventory, store)
    ids = tuple(dict.fromkeys(catalog.find(opened, word) for word in words))
    for id_ in sorted(opened.pins().intersection(ids)):
        raise BadInput(
            f"snapshot {id_} is pinned; nothing was deleted", hint=f"vmckpt snapshot unpin {id_}"
        )
    return DeletionPlan(store=opened, ids=ids, known=catalog.readable(opened, ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What pruning makes of each snapshot."""

    store: Store
    schedule: str
    fates: tuple[PruneDecision, ...]

    def carry_out(self) -> Iterator[PruneDecision]:
        """Delete what goes; tells of each. Raises StoreError."""
        return snapshot_prune.carry_out(self.store, self.fates)


def prune(
    inventory: Inventory, store: str | None, keep: Keep, schedule: str | None, *, dry_run: bool
) -> Pruning:
    """See what a schedule's retention makes of its snapshots. Raises BadInput, StoreError."""
    if not dry_run:
        inventory.may_act()
    opened = open_store(inventory, store)
    found = snapshot_prune.survey(opened, keyring().trusted())
    name = snapshot_prune.schedule_of(found, schedule, opened.backend.where)
    fates = snapshot_prune.plan(found, keep, schedule=name, now=time.time(), zone=local_zone())
    return Pruning(store=opened, schedule=name, fates=fates)


def local_zone() -> tzinfo:
    """The time zone of this machine, with its summer times; UTC if it has none."""
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
    """Remove what no snapshot needs; where that was. Raises StoreError."""
    if not dry_run:
        inventory.may_act()
    opened = open_store(inventory, store)
    done = collecting.collect(
        opened, catalog.references, grace=grace, dry_run=dry_run, progress=say
    )
    return opened.backend.where, done


def copy(
    inventory: Inventory, words: Sequence[str], from_: str | None, to: str, progress: Progress
) -> Iterator[Moved]:
    """Copy snapshots into another store; tells of each. Raises BadInput, StoreError."""
    inventory.may_act()
    source, target = open_store(inventory, from_), open_store(inventory, to)
    ids = dict.fromkeys(catalog.find(source, word) for word in words)
    return (snapshot_copy.copy(source, target, id_, progress) for id_ in ids)


def export(
    inventory: Inventory, store: str | None, word: str, path: Path, progress: Progress
) -> Moved:
    """Write a snapshot into a new file. Raises BadInput, StoreError."""
    opened = open_store(inventory, store)
    return archive.export(opened, catalog.find(opened, word), path, progress)


def import_(inventory: Inventory, store: str | None, path: Path, progress: Progress) -> Moved:
    """Put what a file holds into a store. Raises KeyRefused, StoreError."""
    inventory.may_act()
    return archive.import_(open_store(inventory, store), path, keyring().trusted(), progress)


def load_identity(path: Path, passphrase: keys_identity.Passphrase | None) -> Identity:
    """Loads the identity in a file when it is first needed, and once."""
    return cache(lambda: keys_identity.load(path, passphrase))


def new_identity(path: Path, passphrase: str | None) -> bytes:
    """Make an administrator's identity; its public key. Raises KeyRefused."""
    inventories.may_act()
    return keys_identity.create(path, passphrase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The keys of this controller, without any secret."""

    writer: Named | None
    """Its own, under which others can trust it; None: it has signed nothing yet."""
    domain: str | None
    admins: tuple[Named, ...]
    writers: tuple[Named, ...]


def keys() -> Keys:
    """What this controller encrypts for, signs with and trusts. Raises KeyRefused."""
    ring = keyring()
    writers = ring.writers()
    others = {one.key for one in writers}
    return Keys(
        # Looking makes no key.
        writer=ring.writer() if ring.trusted() - others else None,
        domain=ring.domain(),
        admins=ring.admins(),
        writers=writers,
    )


def add_key(name: str, text: str) -> Named:
    """Encrypt new snapshots for one more. Raises KeyRefused."""
    inventories.may_act()
    return keyring().add_admin(name, text)


def remove_key(name: str) -> None:
    """Encrypt new snapshots no more for somebody. Raises KeyRefused."""
    inventories.may_act()
    keyring().remove_admin(name)


def trust(name: str, text: str) -> Named:
    """Believe what one more writer has signed. Raises KeyRefused."""
    inventories.may_act()
    return keyring().trust(name, text)


def distrust(name: str) -> None:
    """Believe a writer no more. Raises KeyRefused."""
    inventories.may_act()
    keyring().distrust(name)


def export_salt(path: Path, passphrase: str | None) -> str:
    """Put the domain's salt into a new file; the domain. Raises KeyRefused."""
    inventories.may_act()
    return keys_keyring.write(keyring(), path, passphrase)


def import_salt(path: Path, passphrase: keys_identity.Passphrase | None) -> str:
    """Join the domain whose salt is in a file; the domain. Raises KeyRefused."""
    inventories.may_act()
    return keys_keyring.load(keyring(), path, passphrase)


def heirs(drop: str | None) -> tuple[Named, ...]:
    """For whom snapshots are after a rotation. Raises KeyRefused if there is nobody."""
    admins = keyring().admins()
    if drop is not None and drop not in {one.name for one in admins}:
        raise KeyRefused(
            f"no key named {drop[:80]!r}",
            hint="if it was removed already, rotate without --drop; see vmckpt snapshot keys list",
        )
    left = tuple(one for one in admins if one.name != drop)
    if not left:
        raise KeyRefused(
            "no administrator's key would be left: nobody could read the snapshots",
            hint="add one with vmckpt snapshot keys add NAME KEY",
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
    """Wrap the keys of all snapshots anew, in these stores or all; tells of each store.

    Raises KeyRefused, StoreError.
    """
    if not dry_run:
        inventory.may_act()
    left = heirs(drop)
    key, trusted = identity(), keyring().trusted()
    opened = [open_store(inventory, name) for name in stores or inventory.stores]
    if drop is not None and not dry_run:
        # First: what is made meanwhile is not for the key that goes.
        keyring().remove_admin(drop)
    admins = [one.key for one in left]
    for store in opened:
        yield rekey.rotate(store, key, admins, trusted, dry_run=dry_run, progress=progress)


@contextmanager
def opened(
    inventory: Inventory, store: str | None, snapshot: str, identity: Identity | None
) -> Iterator[Browse]:
    """A snapshot that a trusted writer signed, to be looked into, in the store of that name or
    wherever it is. Raises StoreError, BadInput."""
    found = located(inventory, store, snapshot)
    trusted = keyring().trusted()
    looked = catalog.inspect(found.store, found.id, trusted)
    private, sealing = catalog.opened(found.store, looked, identity, trusted)
    with TieredReader([one.store for one in found.tiers], sealing) as reader:
        yield Browse(looked.public, private, reader)
