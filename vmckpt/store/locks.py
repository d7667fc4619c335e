"""Locks of the processes that use a store. Each lock is an object that its owner keeps refreshing.

A writer's lock lists the pending deletions that the writer has seen (see `gc`). The age of a lock
is measured only by the store's clock, so hosts need no synchronised clocks.
"""

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vmckpt.errors import NotInStore, StoreDamaged, StoreError
from vmckpt.lease.clock import boottime
from vmckpt.store.backend.base import Backend, Stored
from vmckpt.store.fault_injection import fault
from vmckpt.store.format import manifest
from vmckpt.units import Seconds

BEAT = Seconds(30.0)
LIFE = Seconds(900.0)
"""A lock that has not been refreshed for this long is dead."""
_OWN_LIFE = Seconds(LIFE / 2)
"""A writer that could not refresh its lock for this long stops, before other processes consider the
lock dead. The writer must not refresh the lock later, because a garbage collection may already have
ignored the lock."""
GC = "locks/gc"


class LockPurpose(StrEnum):
    """The purpose of a lock."""

    WRITE = "write"
    DELETE = "delete"
    GC = "gc"


@dataclass(frozen=True, slots=True)
class LockSeen:
    """A lock as read from the store."""

    key: str
    work: LockPurpose | None
    """The purpose of the lock; None if the lock cannot be read."""
    beaten_at: Seconds
    knows: frozenset[str]
    """Tokens of the pending deletions that the lock's owner has seen."""
    about: str
    """For a delete lock: the ID of the snapshot that is being deleted; otherwise empty."""
    owner: str
    """Description of the lock's owner, for messages."""

    def alive(self, now: Seconds, life: Seconds) -> bool:
        """Return whether the lock was refreshed in the last `life` seconds.

        If so, the owner may still be running.
        """
        return now - self.beaten_at < life


class Lock:
    """A lock of this process, refreshed by a thread from take() to release()."""

    def __init__(
        self,
        backend: Backend,
        work: LockPurpose,
        *,
        about: str = "",
        beat: Seconds = BEAT,
        clock: Callable[[], float] = boottime,
    ) -> None:
        self.key = GC if work is LockPurpose.GC else f"locks/{work}-{secrets.token_hex(8)}"
        self._backend, self._work, self._about, self._beat = backend, work, about, beat
        self._token = secrets.token_hex(8)
        self._knows: tuple[str, ...] = ()
        self._ended = threading.Event()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name=self.key, daemon=True)
        self._clock, self._beaten = clock, clock()

    def take(self) -> bool:
        """Take the lock. Returns False if another process holds it. Raises StoreError."""
        # A retried put may find the object that the first attempt wrote.
        if not self._backend.put(self.key, self._bytes()) and not self.held():
            return False
        fault("lock: taken")
        self._thread.start()
        return True

    def knows(self, condemnations: Sequence[str]) -> None:
        """Record the tokens of the pending deletions that this writer has seen.

        Raises StoreError, for example if the lock has expired.
        """
        with self._guard:
            self._ours()
            self._knows = tuple(condemnations)
            self._write()
        fault("lock: knows")

    def held(self) -> bool:
        """Return whether the lock in the store still belongs to this process.

        Raises StoreError if that is unknown.
        """
        try:
            raw = self._backend.get(self.key)
        except NotInStore:
            return False
        return self._token == _values(self.key, raw, self._backend.where).get("token")

    def now(self) -> Seconds:
        """Refresh the lock, and return the current time by the store's clock.

        Raises StoreError, for example if the lock has expired.
        """
        with self._guard:
            self._ours()
            self._write()
            for one in self._backend.keys(self.key):
                return one.modified_at
            self._ours()
            raise StoreError(
                f"{self._backend.where} does not list {self.key}, which was just written"
            )

    def still_ours(self) -> None:
        """Raise StoreError if the lock has expired or was removed."""
        with self._guard:
            self._ours()

    def _ours(self) -> None:
        if self._slept or not self.held():
            raise StoreError(
                f"{self._backend.where}: {self.key} expired: this process did not refresh the lock"
                " in time",
                hint="run the command again; nothing was published and nothing was lost",
            )

    def release(self) -> None:
        """Release the lock. Raises StoreError."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.held():
            self._backend.delete(self.key)
        fault("lock: released")

    def _keep(self) -> None:
        while not self._ended.wait(self._beat):
            # A failed refresh is retried. Callers that rely on the lock check the lock themselves.
            with contextlib.suppress(StoreError), self._guard:
                if self._slept or not self.held():
                    return
                self._write()

    def _write(self) -> None:
        began = self._clock()
        self._backend.put(self.key, self._bytes(), replace=True)
        self._beaten = began

    @property
    def _slept(self) -> bool:
        return self._clock() - self._beaten > _OWN_LIFE

    def _bytes(self) -> bytes:
        values = {
            "work": str(self._work), "token": self._token, "host": socket.gethostname(),
            "pid": os.getpid(), "about": self._about, "knows": list(self._knows),
        }  # fmt: skip
        return manifest.written(self.key, values)


def list_locks(backend: Backend) -> Iterator[LockSeen]:
    """Yield all locks of a store. Raises StoreError."""
    for one in list(backend.keys("locks/")):
        try:
            yield parse_lock(one, backend.get(one.key), backend.where)
        except NotInStore:
            continue


def parse_lock(one: Stored, raw: bytes, where: str) -> LockSeen:
    """Parse a lock. `raw`: its content; `where`: the store's name, for messages.

    An unreadable lock is treated as the lock of a writer that has seen no pending deletion. So it
    delays all deletions until it expires.
    """
    try:
        values = _values(one.key, raw, where)
        return LockSeen(
            key=one.key,
            work=LockPurpose(str(values["work"])),
            beaten_at=one.modified_at,
            knows=frozenset(str(each) for each in values["knows"]),
            about=str(values["about"]),
            owner=f"process {values['pid']} on {values['host']}",
        )
    except (StoreDamaged, ValueError, LookupError, TypeError):
        return LockSeen(one.key, None, one.modified_at, frozenset(), "", "an unknown process")


def _values(key: str, raw: bytes, where: str) -> dict[str, Any]:
    return manifest.parsed(key, raw, where)
