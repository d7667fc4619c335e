"""What a store is kept in: a few calls that a folder and an object store both know."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from vmckpt.errors import BadInput
from vmckpt.units import Seconds

Data = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as a listing tells it."""

    key: str
    size: int
    modified_at: Seconds
    """Unix time by the clock of whoever keeps the store: good for comparing with another one."""


class Backend(Protocol):
    """Objects by key. May be used from several threads; every call may raise StoreError."""

    where: str
    """For messages: the folder, or s3://bucket/prefix."""

    def put(self, key: str, data: Data, *, replace: bool = False) -> bool:
        """Write an object, whole or not at all; it is durable on return.

        False if there is one already and `replace` is not set; that one stays as it is. Raises
        StoreFull.
        """

    def prove_locks(self) -> None:
        """Try whether what is there stays, if it is not to be replaced: locks depend on it.

        Writes something and removes it. Raises StoreError if it is written over.
        """

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """An object or a part of it; less if it ends before. Raises NotInStore."""

    def keys(self, prefix: str) -> Iterator[Stored]:
        """All objects below a prefix that ends with a slash, or the one object of that key."""

    def delete(self, key: str) -> None:
        """Remove an object; it is gone for good on return. No error if there is none."""

    def leftovers(self) -> Iterator[Stored]:
        """What puts that never ended have left, by names that `clear` knows."""

    def clear(self, leftover: str) -> None:
        """Remove what a put has left. No error if it is gone."""


_KEY = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}/){0,3}[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def is_key(key: str) -> bool:
    """Whether an object may have this name."""
    return _KEY.fullmatch(key) is not None


def checked(key: str) -> str:
    """A key that is one: it may become a path, and some come from outside. Raises BadInput."""
    if not is_key(key):
        raise BadInput(f"{key[:80]!r} is no name for an object of a store")
    return key
