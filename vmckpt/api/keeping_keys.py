"""The facade's part for the keys of snapshots."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vmckpt import inventory as inventories
from vmckpt.api.keeping import open_store
from vmckpt.api.snapshots import keyring
from vmckpt.errors import KeyRefused
from vmckpt.inventory import Inventory
from vmckpt.snapshot import rekey
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.rekey import Rotated
from vmckpt.store.keys import identity as keys_identity
from vmckpt.store.keys import keyring as keys_keyring
from vmckpt.store.keys.keyring import Named


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
            mend="if it was removed already, rotate without --drop; see vmckpt snapshot keys list",
        )
    left = tuple(one for one in admins if one.name != drop)
    if not left:
        raise KeyRefused(
            "no administrator's key would be left: nobody could read the snapshots",
            mend="add one with vmckpt snapshot keys add NAME KEY",
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
