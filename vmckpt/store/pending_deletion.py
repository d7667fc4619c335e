"""Condemnations: lists of objects that a collection will remove once nobody can count on them."""

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
    """One list."""

    token: str
    keys: tuple[str, ...]
    at: Seconds
    """By the store's clock."""

    @property
    def packs(self) -> tuple[str, ...]:
        """Ids of the packs among them."""
        found = (format_pack.pack_of(key) for key in self.keys)
        return tuple(pack for pack in found if pack is not None)


def load(backend: Backend) -> list[PendingDeletion]:
    """All condemnations. Raises StoreError, also if one cannot be read: nothing can be counted on
    then."""
    found = []
    for one in list(backend.keys("condemned/")):
        try:
            values = manifest.parsed(one.key, backend.get(one.key), backend.where)
        except NotInStore:
            continue
        try:
            keys = tuple(checked(str(key)) for key in values["keys"])
        except (LookupError, TypeError, BadInput) as exc:
            raise StoreDamaged(f"{backend.where}: {one.key} is not what a store writes") from exc
        found.append(PendingDeletion(one.key.rpartition("/")[2], keys, one.modified_at))
    return found


def write(backend: Backend, keys: Sequence[str]) -> str:
    """Condemn objects; the token by which writers say that they know."""
    token = secrets.token_hex(8)
    key = f"condemned/{token}"
    backend.put(key, manifest.written(key, {"keys": list(keys)}))
    return token


def known_to(lock: Lock, backend: Backend) -> frozenset[str]:
    """The packs that whoever writes under a lock must not count on; the lock tells that it knows.

    The order matters: see gc. Raises StoreError.
    """
    judged = load(backend)
    if judged:
        lock.knows([one.token for one in judged])
    return frozenset(pack for one in judged for pack in one.packs)
