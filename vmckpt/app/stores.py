"""Open and create the stores of an inventory, and load keys."""

import os
from functools import cache
from pathlib import Path

from vmckpt.app import permission
from vmckpt.errors import KeyRefused
from vmckpt.inventory import Inventory
from vmckpt.journal import location
from vmckpt.model.disk import StorePlace
from vmckpt.snapshot.catalog import Identity
from vmckpt.store import repository
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.keys import identity
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.keyring import FOLDER, Keyring
from vmckpt.store.repository import Store

_CACHE = "cache"


def keyring() -> Keyring:
    """Return the keys of this controller."""
    return Keyring(_state() / FOLDER)


def _state() -> Path:
    return location.state_folder(os.environ, root=os.geteuid() == 0)


def open_place(where: StorePlace) -> Store:
    """Open a store of the inventory. Raises NotInStore, StoreNewer, StoreError, BadInput."""
    return repository.opened(where, cache=_state() / _CACHE)


def init(inventory: Inventory, name: str | None) -> str:
    """Create a store of the inventory. Returns its location.

    Raises ReadOnly, InventoryError, StoreError, and BadInput if the store exists.
    """
    permission.require(inventory, "snapshot init")
    store = Store.create(backend_of(inventory.store(name).url))
    return store.backend.where


def require_key(identity: Identity | None) -> None:
    """Check that `identity` could open a snapshot that is taken now. Raises KeyRefused."""
    keys = keyring()
    if not keys.encrypts:
        return
    if identity is None:
        raise KeyRefused(
            "snapshots are encrypted and cannot be restored without a key; nothing was done",
            hint="provide an identity with --identity or VMCKPT_IDENTITY",
        )
    if public_of(identity()) not in {one.key for one in keys.admins()}:
        raise KeyRefused(
            "snapshots are not encrypted for this identity; nothing was done",
            hint="run vmckpt snapshot keys list to see which keys open snapshots",
        )


def load_identity(path: Path, passphrase: identity.Passphrase | None) -> Identity:
    """Return a function that loads the identity in a file on the first call, and caches it."""
    return cache(lambda: identity.load(path, passphrase))
