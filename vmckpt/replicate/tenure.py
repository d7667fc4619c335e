"""The primary's hold on its guest: renewals, heartbeats, and what the guard is told.

The guard kills the guest if the last renewal is too old, whatever this process does. Renewals stop
by themselves when an epoch hangs in libvirt: its output is held then, and nobody is served.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import LeaseLost, VmckptError
from vmckpt.lease.witness import LeaseClient, boottime
from vmckpt.replicate.facts import Lease
from vmckpt.replicate.guardpage import GuardPage
from vmckpt.replicate.link import Cut, Line
from vmckpt.replicate.wire import Beat
from vmckpt.units import Seconds

BEAT = Seconds(0.1)
HUNG = Seconds(3.0)
"""So long no call of libvirt lasts that will still come to an end."""
_TOKEN = "token"


class Tenure:
    """Use as `with Tenure(...) as tenure`: as long as the block lasts the guest may run here."""

    def __init__(
        self, lease: Lease | None, folder: Path, page: GuardPage, *, holder: str,
        note: Callable[[], dict[str, Any]], lives: Callable[[], bool],
    ) -> None:  # fmt: skip
        """`note`: what heartbeats tell of us; `lives`: whether the guest's QEMU is there."""
        self._lives = lives
        self._lease, self._folder, self._page, self._note = lease, folder, page, note
        self._client = self._renewer = None
        if lease is not None:
            limit = lease.terms.limit
            self._client = LeaseClient(lease.url, holder=holder, limit=limit)
            self._renewer = LeaseClient(lease.url, holder=holder, limit=limit)
        self.token = self._stored()
        self.line: Line | None = None
        """Over which heartbeats go; None: none."""
        self.lost: str | None = None
        """Why the guest may run here no more."""
        self._renewed = float("-inf")
        self._busy: float | None = None
        self._tokens, self._changing = threading.Lock(), False
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("beats", self._beat), ("lease", self._keep))
        ]

    def __enter__(self) -> "Tenure":
        """Raises LeaseLost, LeaseUnreachable."""
        if self._client is not None and not self.token:
            self._store(self._client.acquire())
        self.token = self.token or 1
        if self._client is not None:
            self._renew()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The lease stays as it is: a new agent goes on with it, or the guard ends the guest."""
        self._over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for client in (self._client, self._renewer):
            if client is not None:
                client.close()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While QEMU is told something: if that hangs, so does the guest for everybody outside."""
        self._busy = time.monotonic()
        try:
            yield
        finally:
            self._busy = None

    def check(self) -> None:
        """Right before something gets out that others see. Raises LeaseLost."""
        if self.lost is not None:
            raise LeaseLost(self.lost)
        if self._lease is not None and boottime() - self._renewed > self._lease.terms.lasts:
            raise LeaseLost("the lease was not renewed in time")

    def validate(self) -> None:
        """The backup has a whole epoch: from now on it may take over. Raises VmckptError."""
        if self._client is not None:
            self._client.validate(self.token)

    def invalidate(self) -> None:
        """The backup's standby is worth nothing any more. Raises VmckptError."""
        with self._tokens:
            self._changing = True
            self._change()

    def _change(self) -> None:
        if self._client is not None:
            self._store(self._client.invalidate(self.token))
        self._changing = False

    def hand_over(self, to: str) -> None:
        """The guest stands still here and is the other's from now on. Raises VmckptError."""
        if self._client is not None:
            self._over.set()
            self._threads[1].join()
            self._client.hand_over(self.token, to)

    def release(self) -> None:
        """The protection has ended; the guard must be gone. Raises VmckptError."""
        if self._client is not None:
            self._client.release(self.token)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._page.beat()
            line = self.line
            if line is not None:
                with suppress(Cut):
                    line.send(Beat(sent=time.time(), note=json.dumps(self._note()).encode()))

    def _keep(self) -> None:
        if self._lease is None:
            return
        every = self._lease.terms.every
        while not self._over.wait(every):
            busy = self._busy
            if busy is not None and time.monotonic() - busy > HUNG:
                continue
            if not self._lives():
                return  # nobody is to be kept from running it
            with suppress(VmckptError):
                self._renew()
            if self.lost is not None:
                return

    def _renew(self) -> None:
        assert self._renewer is not None
        assert self._lease is not None
        with self._tokens:
            if self._changing:
                # It had no answer: only whoever asks again knows which token is the right one.
                self._change()
            sent = self._renewer.renew(self.token)
        if sent is None:
            self.lost = "another host has the lease: the guest must not run here"
            self._page.lose()
            return
        self._renewed = sent
        self._page.renewed = sent

    def _stored(self) -> int:
        try:
            return int((self._folder / _TOKEN).read_text())
        except (OSError, ValueError):
            return 0

    def _store(self, token: int) -> None:
        new = self._folder / f"{_TOKEN}.new"
        new.write_text(str(token))
        new.rename(self._folder / _TOKEN)
        self.token = token
