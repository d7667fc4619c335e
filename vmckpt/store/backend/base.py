"""The interface to a store's objects, implemented for directories and for object stores."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vmckpt.errors import BadInput
from vmckpt.units import Seconds

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in a listing."""

    key: str
    size: int
    modified_at: Seconds
    """Unix time by the store's clock. Compare this time only with times from the same store."""


def full_hint(key: str) -> str:
    """Return how to make space for an object in a full store.

    A store that has no space even for a lock cannot delete anything either.
    """
    if key.startswith("locks/"):
        return "free some space there: vmckpt can delete nothing from the store without a lock"
    return (
        "free some space, or delete snapshots with vmckpt snapshot delete SNAPSHOT, then run"
        " vmckpt snapshot gc --grace 0s, twice, while no restore is running"
    )


class Backend(Protocol):
    """Objects by key. Safe to use from several threads. Every call may raise StoreError."""

    where: str
    """The directory, or s3://bucket/prefix, for messages."""

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        """Write an object atomically. On return the object is durable.

        If the object exists and `replace` is not set, changes nothing and returns False. Raises
        StoreFull.
        """

    def prove_locks(self) -> None:
        """Test that a put without `replace` keeps an existing object, which locks depend on.

        Writes a test object and removes it afterwards. Raises StoreError if the second put has
        overwritten the object.
        """

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of an object, starting at `offset`; None: all bytes from there.

        Returns fewer bytes if the object ends before that. Raises NotInStore.
        """

    def keys(self, prefix: str) -> Iterator[Stored]:
        """List all objects below a prefix that ends with a slash, or the object with that key."""

    def delete(self, key: str) -> None:
        """Remove an object durably. Does nothing if the object does not exist."""

    def leftovers(self) -> Iterator[Stored]:
        """List the leftovers of interrupted puts. `clear` accepts the names in the list."""

    def clear(self, leftover: str) -> None:
        """Remove a leftover of an interrupted put. Does nothing if the leftover does not exist."""


_KEY = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def is_key(key: str) -> bool:
    """Return whether a string is a valid object key."""
    return _KEY.fullmatch(key) is not None


def checked(key: str) -> str:
    """Check a key and return it. Raises BadInput for an invalid key.

    Keys are used in file paths, and some keys come from untrusted input.
    """
    if not is_key(key):
        raise BadInput(f"{key[:80]!r} is not a valid object key")
    return key
