"""The primary's side of the lease: renewals, heartbeats, and the times that the watchdog enforces.

While a standby may take over, the guest is killed if the last renewal is too old, even if this
process is hung or gone. The watchdog kills the guest, and so does a kernel timer in QEMU, which
needs no other process. Renewals stop when an epoch hangs in libvirt, since output is then buffered
and clients of the guest get no replies.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from vmckpt.errors import LeaseLost, VmckptError
from vmckpt.lease.client import LeaseClient, LeaseForgotten
from vmckpt.lease.clock import boottime
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Heartbeat
from vmckpt.replication.session import Lease
from vmckpt.replication.watchdog.restart import WatchdogRestart
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds
from vmckpt.util import atomic_file

BEAT = Seconds(0.1)
HUNG = Seconds(3.0)
"""A call to libvirt or QEMU that has lasted this long is considered hung."""
_TOKEN, _CHANGING = "token", "token-changing"
_WITHOUT_LEASE = Seconds(1.0)
_AGAIN = Seconds(0.2)


class Enforcer(Protocol):
    """Kills the guest at the end of its lease without any process of vmckpt."""

    def arm(self, ends: float) -> None:
        """Kill the guest at this time of CLOCK_BOOTTIME, unless rearmed or disarmed before then.

        Raises VmckptError.
        """

    def disarm(self) -> None:
        """Cancel the kill. May be repeated. Raises VmckptError."""


class LeaseHolder:
    """The lease of the primary.

    Inside the block, the lease is renewed, and the guest may run on this host until `lost` is set.
    Use as `with LeaseHolder(...) as lease`. Without a lease store (`lease` is None), this object
    only sends heartbeats and restarts the watchdog if needed.
    """

    def __init__(
        self, lease: Lease | None, folder: Path, page: WatchdogPage, *, holder: str,
        note: Callable[[], dict[str, Any]], lives: Callable[[], bool],
        restart_watchdog: Callable[[], None] = lambda: None, enforcer: Enforcer | None = None,
    ) -> None:  # fmt: skip
        """`folder`: the protection's directory, which keeps the token; `holder`: this host's name;
        `note`: returns the status to send in heartbeats; `lives`: returns whether the guest's QEMU
        is running; `restart_watchdog`: starts the watchdog if it is gone; `enforcer`: None if the
        kernel cannot enforce the lease.
        """
        self._lease, self._folder, self._page, self._note = lease, folder, page, note
        self._lives, self._enforcer = lives, enforcer
        self._watchdog = WatchdogRestart(page, restart_watchdog)
        self._client = self._renewer = None
        if lease is not None:
            limit = lease.terms.limit
            self._client = LeaseClient(lease.url, holder=holder, limit=limit)
            self._renewer = LeaseClient(lease.url, holder=holder, limit=limit)
        self.token = _stored(folder)
        self.line: PeerConnection | None = None
        """The connection for heartbeats; None: not connected."""
        self.lost: str | None = None
        """Why the guest may no longer run on this host; None: the guest may run."""
        self.acquired = False
        """The lease was newly acquired, so an earlier standby can never take over."""
        self._validated = False
        self._renewed = float("-inf")
        self._busy: float | None = None
        self._tokens, self._changing = threading.RLock(), False
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("beats", self._beat), ("lease", self._keep))
        ]

    def __enter__(self) -> Self:
        """Continue an earlier agent's lease, or acquire the lease, and start renewing it.

        Raises LeaseLost, LeaseUnreachable, LeaseRefused, and any error of the enforcer.
        """
        if self._client is not None:
            self._begin(self._client)
            if not self._page.renewed:
                self._disarm()  # an earlier agent may have died and left the timer armed
        self.token = self.token or 1
        for thread in self._threads:
            thread.start()
        return self

    def _begin(self, client: LeaseClient) -> None:
        """Continue an earlier agent's lease, or acquire the lease."""
        if self.token and not (self._folder / _CHANGING).exists():
            self._renew()
            if self.lost is None:
                return
            self.lost = None
        # Either this is the first agent, or only the lease store knows the token. The lease store
        # refuses the request if another host holds the lease.
        try:
            token = client.acquire()
        except LeaseLost:
            self._page.lose()
            raise
        self.acquired = True
        self._kept(token)
        self._renew()
        self.check()

    def __exit__(self, *_: object) -> None:
        """Stop the renewals without releasing the lease, which a new agent can continue."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for client in (self._client, self._renewer):
            if client is not None:
                client.close()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark a call to libvirt or QEMU in the block. If the call hangs, renewals stop."""
        before = self._busy
        self._busy = time.monotonic() if before is None else before
        try:
            yield
        finally:
            self._busy = before

    def check(self) -> None:
        """Verify the lease, right before output is released. Raises LeaseLost."""
        if self.lost is not None:
            raise LeaseLost(self.lost)
        if not self._page.renewed or self._lease is None:
            return  # no standby can take over
        if boottime() - self._renewed > self._lease.terms.lasts:
            raise LeaseLost("the lease was not renewed in time")

    @property
    def validated(self) -> bool:
        """Whether the lease store has recorded that the standby is valid; True without a store.

        Becomes False again if the lease store has lost the record, as after a failover to a
        replica.
        """
        return self._client is None or self._validated

    def validate(self) -> None:
        """Record that the backup has a complete epoch, so that the backup may take over.

        From then on, the watchdog kills the guest when this host's lease ends. May be repeated.
        Raises VmckptError.
        """
        if self._client is None:
            return
        with self._tokens:
            self._renew()
            self.check()
            self._enforce(self._renewed)
            self._client.validate(self.token)
            self._validated = True

    def invalidate(self) -> None:
        """Record that the standby is invalid.

        Raises VmckptError if this failed or the outcome is unknown; then each renewal tries again.
        """
        with self._tokens:
            self._changing = True
            self._change()

    def _change(self) -> None:
        if self._client is not None:
            # If the agent dies after the lease store has changed the token, the file is outdated.
            with suppress(OSError):
                (self._folder / _CHANGING).touch()
            self._kept(self._newer(self._client))
        self._changing = False

    def _newer(self, client: LeaseClient) -> int:
        """Return a new token, with which no standby can take over. Raises VmckptError."""
        try:
            return client.invalidate(self.token)
        except LeaseLost:
            # Either another host holds the lease, or the lease store has forgotten the last token.
            # A renewal shows which is the case.
            try:
                client.renew(self.token)
            except LeaseForgotten:
                return client.acquire_again(self.token)
            raise

    def transfer(self, to: str) -> None:
        """Hand the lease over to the host `to`. The guest must be paused on this host.

        Retries until the lease store answers: without an answer, no host may run the guest. Raises
        LeaseLost, LeaseRefused if the lease is not handed over.
        """
        if self._client is None:
            return
        while True:
            with self._tokens:
                try:
                    self._client.hand_over(self.token, to)
                except LeaseUnreachable:
                    pass
                else:
                    self._over.set()
                    return
            time.sleep(_AGAIN)

    def release(self) -> None:
        """Release the lease at the end of the protection, after the watchdog has exited.

        Raises VmckptError.
        """
        if self._client is not None:
            self._client.release(self.token)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._page.beat()
            line = self.line
            # The backup tries to take over the lease only if the primary is silent.
            if line is not None and not self._hangs():
                with suppress(ConnectionLost):
                    line.send(Heartbeat(sent=time.time(), note=json.dumps(self._note()).encode()))

    def _hangs(self) -> bool:
        busy = self._busy
        return busy is not None and time.monotonic() - busy > HUNG

    def _keep(self) -> None:
        every = _WITHOUT_LEASE if self._lease is None else self._lease.terms.every
        while not self._over.wait(every):
            if self._hangs():
                continue
            if not self._lives():
                return  # the guest is not running here, so another host may run it
            self._watchdog.look()
            with suppress(VmckptError):
                self._renew()
            if self._is_lost():
                self._page.lose()
                return

    def _renew(self) -> None:
        if self._renewer is None:
            return
        with self._tokens:
            if self._over.is_set():
                return
            if self._changing:
                # The last change was not answered: only repeating it shows which token is valid.
                self._change()
            try:
                sent = self._renewer.renew(self.token)
            except LeaseForgotten:
                # No other host holds the lease, and no standby can take over before `validate`.
                self._kept(self._renewer.acquire_again(self.token))
                self.acquired = True
                sent = self._renewer.renew(self.token)
            if sent is None:
                self.lost = "the lease is lost: the guest must not run here"
                return
            self._renewed = sent
            self._validated = self._validated and self._renewer.protected
            if self._page.renewed:
                self._enforce(sent)

    def _enforce(self, sent: float) -> None:
        """Make the watchdog and the kernel kill the guest when the lease renewed at `sent` ends."""
        self._page.renewed = sent
        if self._enforcer is not None and self._lease is not None:
            self._enforcer.arm(sent + self._lease.terms.lasts)

    def _disarm(self) -> None:
        if self._enforcer is not None:
            self._enforcer.disarm()

    def _is_lost(self) -> bool:
        return self.lost is not None

    def _kept(self, token: int) -> None:
        """Store a new token, with which no standby can take over.

        So the watchdog need not enforce the lease, and output need not wait, even if the file
        cannot be written: an agent that finds an older token in the file acquires the lease again.
        """
        self._validated = False
        self._page.renewed = 0.0
        self._disarm()
        self.token = token
        with suppress(OSError):
            atomic_file.put(self._folder / _TOKEN, str(token))
            (self._folder / _CHANGING).unlink(missing_ok=True)


def _stored(folder: Path) -> int:
    try:
        return int((folder / _TOKEN).read_text())
    except (OSError, ValueError):
        return 0
