"""The backup's end of the lease: it watches the holder, and takes over when that must be dead."""

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
"""Per lifetime of a renewal: whoever takes over must have watched the holder all the time."""
_TURN = Seconds(0.02)
_TOKEN = "token"


class TakeoverClaim(Protocol):
    """What the backup may do about the lease."""

    @property
    def token(self) -> int:
        """The newest that is known: the standby's."""

    @property
    def says(self) -> str:
        """What is in the way of a takeover."""

    @property
    def patience(self) -> Seconds:
        """So long a silence of the primary is ordinary."""

    def takes(self, token: int) -> bool:
        """Whether who shows that token is the primary; a newer one is known from then on."""

    def ask(self) -> str | None:
        """Take over if that is possible: why it was; None: not now. Raises VmckptError."""

    def close(self) -> None: ...


class ManualClaim:
    """Without a lease store: the newest token is known, and a person decides."""

    patience = Seconds(0.5)

    def __init__(self, folder: Path) -> None:
        """`folder`: where the newest token is kept for the next agent."""
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
    """With one."""

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
                return f"the lease is ours with token {token}"
            case Denied(why):
                self.says = f"the lease is not ours to take: {why}"
                return self._handed_over()
            case _:
                self.says = f"the primary's lease runs for {told.rest:.2f} s yet"
                self._next = time.monotonic() + min(self._every, max(_TURN, told.rest))
        return None

    def _handed_over(self) -> str | None:
        """Whether the primary has given it to us, with all that our standby has."""
        with self._lock:
            found = self._client.look()
        if found.holder != self._host:
            return None
        # It is ours only by a hand-over of what we have, or since an agent before us took it.
        self.token = found.token
        return f"the lease was handed over with token {found.token}"

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._client.close()
