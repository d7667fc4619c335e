"""The primary's hold on its guest: renewals, heartbeats, and what the watchdog is told.

While a standby may take over, the guest is killed if the last renewal is too old, whatever this
process does: by its watchdog, and by a timer of the kernel's inside QEMU, which needs neither.
Renewals stop by themselves when an epoch hangs in libvirt: its output is held then, and no client
is served.
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
"""So long no call of libvirt lasts that will still come to an end."""
_TOKEN, _CHANGING = "token", "token-changing"
_WITHOUT_LEASE = Seconds(1.0)
_AGAIN = Seconds(0.2)


class Enforcer(Protocol):
    """Kills the guest at the end of its lease without any process of ours."""

    def arm(self, ends: float) -> None:
        """At that time of CLOCK_BOOTTIME, unless it is armed again. Raises VmckptError."""

    def disarm(self) -> None:
        """Not any more. May be repeated. Raises VmckptError."""


class LeaseHolder:
    """Use as `with LeaseHolder(...) as lease`: within the block the guest may run here."""

    def __init__(
        self, lease: Lease | None, folder: Path, page: WatchdogPage, *, holder: str,
        note: Callable[[], dict[str, Any]], lives: Callable[[], bool],
        restart_watchdog: Callable[[], None] = lambda: None, enforcer: Enforcer | None = None,
    ) -> None:  # fmt: skip
        """`note`: what heartbeats tell of us; `lives`: whether the guest's QEMU is there;
        `restart_watchdog`: starts it if it is gone; `enforcer`: None, if the kernel cannot."""
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
        """Over which heartbeats go; None: none."""
        self.lost: str | None = None
        """Why the guest may run here no more."""
        self.acquired = False
        """The lease was taken anew: a standby that there was may never take over."""
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
        """Raises LeaseLost, LeaseUnreachable."""
        if self._client is not None:
            self._begin(self._client)
            if not self._page.renewed:
                self._disarm()  # an agent before us may have died right before it
        self.token = self.token or 1
        for thread in self._threads:
            thread.start()
        return self

    def _begin(self, client: LeaseClient) -> None:
        """Go on with the lease that an agent before us had, or take it."""
        if self.token and not (self._folder / _CHANGING).exists():
            self._renew()
            if self.lost is None:
                return
            self.lost = None
        # The first time; or only the witness knows the token. It is had by nobody else, or refused.
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
        """The lease stays as it is: a new agent goes on with it, or the watchdog ends the guest."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for client in (self._client, self._renewer):
            if client is not None:
                client.close()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While QEMU is told something: if that hangs, so does the guest for everybody outside."""
        before = self._busy
        self._busy = time.monotonic() if before is None else before
        try:
            yield
        finally:
            self._busy = before

    def check(self) -> None:
        """Right before something gets out that others see. Raises LeaseLost."""
        if self.lost is not None:
            raise LeaseLost(self.lost)
        if not self._page.renewed or self._lease is None:
            return  # nobody can take over
        if boottime() - self._renewed > self._lease.terms.lasts:
            raise LeaseLost("the lease was not renewed in time")

    @property
    def validated(self) -> bool:
        """Whether the witness knows that the standby is whole; without one nothing is to be known.
        A witness that was failed over may have forgotten it."""
        return self._client is None or self._validated

    def validate(self) -> None:
        """The backup has a whole epoch: from now on it may take over, and the watchdog enforces our
        end of the lease. May be repeated. Raises VmckptError."""
        if self._client is None:
            return
        with self._tokens:
            self._renew()
            self.check()
            self._enforce(self._renewed)
            self._client.validate(self.token)
            self._validated = True

    def invalidate(self) -> None:
        """The backup's standby is worth nothing any more. Raises VmckptError: that is not sure,
        and is tried again with each renewal."""
        with self._tokens:
            self._changing = True
            self._change()

    def _change(self) -> None:
        if self._client is not None:
            # Who dies between the witness and the file has a token that is nobody's.
            with suppress(OSError):
                (self._folder / _CHANGING).touch()
            self._kept(self._newer(self._client))
        self._changing = False

    def _newer(self, client: LeaseClient) -> int:
        """A token with which no standby can take over. Raises VmckptError."""
        try:
            return client.invalidate(self.token)
        except LeaseLost:
            # Another host has it, or the witness has forgotten our last token: it says so here.
            try:
                client.renew(self.token)
            except LeaseForgotten:
                return client.acquire_again(self.token)
            raise

    def transfer(self, to: str) -> None:
        """The guest stands still here and is the other's from now on.

        Tried until there is an answer: without one nobody may run it. Raises LeaseLost,
        LeaseRefused: then it is not handed over.
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
        """The protection has ended; the watchdog must be gone. Raises VmckptError."""
        if self._client is not None:
            self._client.release(self.token)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._page.beat()
            line = self.line
            # The backup asks for the lease only of one that is silent.
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
                return  # nobody is to be kept from running it
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
                # It had no answer: only whoever asks again knows which token is the right one.
                self._change()
            try:
                sent = self._renewer.renew(self.token)
            except LeaseForgotten:
                # No standby can take over until it is validated again, and no other host holds it.
                self._kept(self._renewer.acquire_again(self.token))
                self.acquired = True
                sent = self._renewer.renew(self.token)
            if sent is None:
                self.lost = "another host has the lease: the guest must not run here"
                return
            self._renewed = sent
            self._validated = self._validated and self._renewer.protected
            if self._page.renewed:
                self._enforce(sent)

    def _enforce(self, sent: float) -> None:
        """Whatever becomes of us, the guest ends with the lease that was renewed then."""
        self._page.renewed = sent
        if self._enforcer is not None and self._lease is not None:
            self._enforcer.arm(sent + self._lease.terms.lasts)

    def _disarm(self) -> None:
        if self._enforcer is not None:
            self._enforcer.disarm()

    def _is_lost(self) -> bool:
        return self.lost is not None

    def _kept(self, token: int) -> None:
        """Nobody can take over since that token: whatever becomes of the file, the watchdog ends no
        guest, and output need not wait. An agent that finds an old one takes the lease anew."""
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
