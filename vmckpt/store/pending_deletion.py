"""Pending deletions: lists of objects that a later garbage collection removes.

An object on one of these lists is *marked for deletion*. The object is removed once no writer can
rely on it any more.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.errors import BadInput, NotInStore, StoreDamaged
from vmckpt.store.backend.base import Backend, checked
from vmckpt.store.format import manifest
from vmckpt.store.format import pack as format_pack
from vmckpt.store.locks import Lock
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True)
class PendingDeletion:
    """A list of objects that are marked for deletion."""

    token: str
    keys: tuple[str, ...]
    at: Seconds
    """When the list was written, by the store's clock."""

    @property
    def packs(self) -> tuple[str, ...]:
        """IDs of the packs in the list."""
        found = (format_pack.pack_of(key) for key in self.keys)
        return tuple(pack for pack in found if pack is not None)


def load(backend: Backend) -> list[PendingDeletion]:
    """Return all pending deletions.

    Raises StoreError. A list that cannot be read is an error too, because that list could contain
    any object.
    """
    found = []
    for one in list(backend.keys("condemned/")):
        try:
            values = manifest.parsed(one.key, backend.get(one.key), backend.where)
        except NotInStore:
            continue
        try:
            keys = tuple(checked(str(key)) for key in values["keys"])
        except (LookupError, TypeError, BadInput) as exc:
            raise StoreDamaged(f"{backend.where}: {one.key} has no valid list of keys") from exc
        found.append(PendingDeletion(one.key.rpartition("/")[2], keys, one.modified_at))
    return found


def write(backend: Backend, keys: Sequence[str]) -> str:
    """Mark objects for deletion, by writing a list of their keys. Raises StoreError.

    Returns the list's token. A writer that has seen the list records the token in its lock.
    """
    token = secrets.token_hex(8)
    key = f"condemned/{token}"
    backend.put(key, manifest.written(key, {"keys": list(keys)}))
    return token


def known_to(lock: Lock, backend: Backend) -> frozenset[str]:
    """Return the packs that are marked for deletion, and list the marks in a writer's lock.

    The writer must not rely on these packs. `gc` explains why the order of steps matters. Raises
    StoreError.
    """
    judged = load(backend)
    if judged:
        lock.knows([one.token for one in judged])
    return frozenset(pack for one in judged for pack in one.packs)
