"""The interface to a store's objects, which a folder and an object store both implement."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vmckpt.errors import BadInput
from vmckpt.units import Seconds

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as listed."""

    key: str
    size: int
    modified_at: Seconds
    """Unix time by the store's clock: compare it only with other times of the same store."""


class Backend(Protocol):
    """Objects by key. Safe to use from several threads; every call may raise StoreError."""

    where: str
    """The folder, or s3://bucket/prefix, for messages."""

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        """Write an object atomically; it is durable on return.

        Returns False, and changes nothing, if the object exists and `replace` is not set. Raises
        StoreFull.
        """

    def prove_locks(self) -> None:
        """Test that a put without `replace` keeps an existing object, as locks depend on it.

        Writes a test object and removes it. Raises StoreError if the object was overwritten.
        """

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return an object or a part of it; less than `length` bytes at its end.

        Raises NotInStore.
        """

    def keys(self, prefix: str) -> Iterator[Stored]:
        """List all objects below a prefix that ends with a slash, or the one object of that key."""

    def delete(self, key: str) -> None:
        """Remove an object durably. Does nothing if it does not exist."""

    def leftovers(self) -> Iterator[Stored]:
        """List the remains of interrupted puts, by names that `clear` takes."""

    def clear(self, leftover: str) -> None:
        """Remove the remains of an interrupted put. Does nothing if they do not exist."""


_KEY = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def is_key(key: str) -> bool:
    """Return whether a word is a valid object key."""
    return _KEY.fullmatch(key) is not None


def checked(key: str) -> str:
    """Return a key if it is valid. Raises BadInput.

    A key may become a path, and some keys come from untrusted input.
    """
    if not is_key(key):
        raise BadInput(f"{key[:80]!r} is not a valid object key")
    return key
