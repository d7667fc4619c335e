"""The facade's part for looking into snapshots."""

from collections.abc import Iterator
from contextlib import contextmanager

from vmckpt.api.keeping import located
from vmckpt.api.snapshots import keyring
from vmckpt.inventory import Inventory
from vmckpt.snapshot import catalog
from vmckpt.snapshot.browse import Browse
from vmckpt.snapshot.catalog import Identity
from vmckpt.store.tiered_reader import TieredReader


@contextmanager
def opened(
    inventory: Inventory, store: str | None, snapshot: str, identity: Identity | None
) -> Iterator[Browse]:
    """A snapshot that a trusted writer signed, to be looked into, in the store of that name or
    wherever it is. Raises StoreError, BadInput."""
    found = located(inventory, store, snapshot)
    trusted = keyring().trusted()
    looked = catalog.look(found.store, found.id, trusted)
    private, sealing = catalog.opened(found.store, looked, identity, trusted)
    with TieredReader([one.store for one in found.tiers], sealing) as reader:
        yield Browse(looked.public, private, reader)
