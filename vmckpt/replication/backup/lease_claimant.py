"""The backup's side of the lease: observe the holder; take over when its guest must be dead."""

import threading
import time
from pathlib import Path
from typing import Protocol

from vmckpt.errors import VmckptError
from vmckpt.lease.client import Denied, LeaseClient, TakenOver
from vmckpt.replication.session import Lease
from vmckpt.units import Seconds
from vmckpt.util import atomic_file

_LOOKS = 4
"""Number of times that the lease is read per lifetime of a renewal: a host may take over only if it
has observed the holder without a gap.
"""
_TURN = Seconds(0.02)
_TOKEN = "token"


class TakeoverClaim(Protocol):
    """The right of the backup to take over."""

    @property
    def token(self) -> int:
        """The newest known token, which is the standby's token."""

    @property
    def says(self) -> str:
        """What prevents a takeover, for display; empty: not known."""

    @property
    def patience(self) -> Seconds:
        """How long the primary may be silent before the backup acts."""

    def takes(self, token: int) -> bool:
        """Return whether a sender with this token is the primary. Remembers a newer token."""

    def ask(self) -> str | None:
        """Take over the lease if possible. Returns the reason, for display; None: not possible now.

        Raises VmckptError.
        """

    def close(self) -> None: ...


class ManualClaim:
    """The claim without a lease store: it knows the newest token, and the operator decides."""

    patience = Seconds(0.5)

    def __init__(self, folder: Path) -> None:
        """`folder`: directory that keeps the newest token for the next agent."""
        self._file = folder / _TOKEN
        self.token = self._stored()
        self.says = "there is no lease store"

    def takes(self, token: int) -> bool:
        if token < self.token:
            return False
        if token > self.token:
            atomic_file.put(self._file, str(token))
            self.token = token
        return True

    def _stored(self) -> int:
        try:
            return int(self._file.read_text())
        except (OSError, ValueError):
            return 1

    def ask(self) -> str | None:
        return None

    def close(self) -> None:
        pass


class LeaseClaim(ManualClaim):
    """The claim with a lease store: it takes over the lease once the holder's lease has ended."""

    def __init__(self, lease: Lease, host: str, folder: Path) -> None:
        super().__init__(folder)
        self.patience = Seconds(lease.ttl / 4)
        self.says = ""
        self._host = host
        self._client = LeaseClient(lease.url, holder=host, limit=lease.terms.limit)
        self._lock = threading.Lock()
        self._next = 0.0
        self._over = threading.Event()
        self._every = lease.ttl / _LOOKS
        self._thread = threading.Thread(target=self._watch, name="lease", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            try:
                with self._lock:
                    self._client.look()
            except VmckptError as exc:
                self.says = str(exc)

    def ask(self) -> str | None:
        if time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self._every
        with self._lock:
            told = self._client.take_over(self.token)
        match told:
            case TakenOver(token):
                self.token = token
                return f"took over the lease with token {token}"
            case Denied(why):
                self.says = f"the lease cannot be taken over: {why}"
                return self._handed_over()
            case _:
                self.says = f"the lease cannot be taken over for another {told.rest:.2f} s"
                self._next = time.monotonic() + min(self._every, max(_TURN, told.rest))
        return None

    def _handed_over(self) -> str | None:
        """Return the reason for a takeover if the lease was handed over to this host, else None."""
        with self._lock:
            found = self._client.look()
        if found.holder != self._host:
            return None
        # This host holds the lease only after a handover with a complete standby, or because an
        # earlier agent took the lease.
        self.token = found.token
        return f"the lease was handed over with token {found.token}"

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()
