"""Who is at work in a store: one object each, written anew again and again while its owner lives.

A writer's lock tells which condemnations it knows of (see `gc`). How old a lock is, is told by the
store's clock alone: hosts need not agree on the time.
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
"""A lock that was not refreshed for so long is dead."""
_OWN_LIFE = Seconds(LIFE / 2)
"""A writer that could not refresh its lock for so long stops, before others take the lock for dead:
a collection may have passed over it, even if it is refreshed later."""
GC = "locks/gc"


class LockPurpose(StrEnum):
    """What a lock is held for."""

    WRITE = "write"
    DELETE = "delete"
    GC = "gc"


@dataclass(frozen=True, slots=True)
class LockSeen:
    """A lock as it was found."""

    key: str
    work: LockPurpose | None
    """None if it cannot be read."""
    beaten_at: Seconds
    knows: frozenset[str]
    """Condemnations its owner knows of."""
    about: str
    """The snapshot that is being deleted."""
    owner: str
    """For messages."""

    def alive(self, now: Seconds, life: Seconds) -> bool:
        """Whether its owner may be at work still."""
        return now - self.beaten_at < life


class Lock:
    """One lock of ours, with a thread that keeps it alive."""

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
        """Take it; False if there is one of that name. Raises StoreError."""
        # A put that was tried again may have met what it had written itself.
        if not self._backend.put(self.key, self._bytes()) and not self.held():
            return False
        fault("lock: taken")
        self._thread.start()
        return True

    def knows(self, condemnations: Sequence[str]) -> None:
        """Tell which condemnations this one knows of. Raises StoreError."""
        with self._guard:
            self._ours()
            self._knows = tuple(condemnations)
            self._write()
        fault("lock: knows")

    def held(self) -> bool:
        """Whether nobody took it from us. Raises StoreError if that is not known."""
        try:
            raw = self._backend.get(self.key)
        except NotInStore:
            return False
        return self._token == _values(self.key, raw, self._backend.where).get("token")

    def now(self) -> Seconds:
        """What time it is by the store's clock. Raises StoreError."""
        with self._guard:
            self._ours()
            self._write()
            for one in self._backend.keys(self.key):
                return one.modified_at
            self._ours()
            raise StoreError(f"{self._backend.where}: {self.key} is not listed")

    def still_ours(self) -> None:
        """Raises StoreError if somebody took us for dead."""
        with self._guard:
            self._ours()

    def _ours(self) -> None:
        if self._slept or not self.held():
            raise StoreError(
                f"{self._backend.where}: {self.key} is gone: this process was taken for dead, as"
                " nothing had been heard of it for long",
                hint="do it again; nothing was published and nothing lost",
            )

    def release(self) -> None:
        """Give it back. Raises StoreError."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self.held():
            self._backend.delete(self.key)
        fault("lock: released")

    def _keep(self) -> None:
        while not self._ended.wait(self._beat):
            # What fails is tried again; whoever relies on the lock asks `held`.
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
    """All locks of a store. Raises StoreError."""
    for one in list(backend.keys("locks/")):
        try:
            yield parse_lock(one, backend.get(one.key), backend.where)
        except NotInStore:
            continue


def parse_lock(one: Stored, raw: bytes, where: str) -> LockSeen:
    """A lock as it was found; one that makes no sense knows nothing and holds everybody up."""
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
        return LockSeen(one.key, None, one.modified_at, frozenset(), "", "somebody unknown")


def _values(key: str, raw: bytes, where: str) -> dict[str, Any]:
    return manifest.parsed(key, raw, where)
