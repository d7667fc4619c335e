"""Pending deletions: lists of objects that a later garbage collection removes.

An object on such a list is *condemned*: it is removed when no writer can rely on it any more.
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
    """A list of condemned objects."""

    token: str
    keys: tuple[str, ...]
    at: Seconds
    """When the list was written, by the store's clock."""

    @property
    def packs(self) -> tuple[str, ...]:
        """IDs of the packs among them."""
        found = (format_pack.pack_of(key) for key in self.keys)
        return tuple(pack for pack in found if pack is not None)


def load(backend: Backend) -> list[PendingDeletion]:
    """Return all pending deletions.

    Raises StoreError, also if a list cannot be read: no object can be relied on then.
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
    """Write a list of objects to be deleted. Raises StoreError.

    Returns the token that a writer's lock lists once the writer knows the list.
    """
    token = secrets.token_hex(8)
    key = f"condemned/{token}"
    backend.put(key, manifest.written(key, {"keys": list(keys)}))
    return token


def known_to(lock: Lock, backend: Backend) -> frozenset[str]:
    """Return the condemned packs, and record in a writer's lock that the writer knows them.

    The writer must not rely on these packs. For the order of these steps see `gc`. Raises
    StoreError.
    """
    judged = load(backend)
    if judged:
        lock.knows([one.token for one in judged])
    return frozenset(pack for one in judged for pack in one.packs)
