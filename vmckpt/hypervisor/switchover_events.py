"""Measure the downtime of a post-copy migration by libvirt's events on both hosts.

After post-copy, neither libvirtd has the statistics: the target received them before the switch,
and the source no longer has the guest.
"""

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Seconds


class SwitchoverEvents:
    """Records when a guest was paused on the source and resumed on the target.

    libvirt's event thread records; another thread may read.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid
        self._paused: list[float] = []
        self._resumed: list[float] = []

    @property
    def downtime(self) -> Seconds | None:
        """The time from the source's last pause to the target's first resume.

        None if an event is missing.
        """
        if not self._resumed:
            return None
        resumed = self._resumed[0]
        before = [at for at in self._paused if at <= resumed]
        return Seconds(resumed - before[-1]) if before else None

    @asynccontextmanager
    async def recorded(self, source: Hypervisor, target: Hypervisor) -> AsyncIterator[None]:
        """Record events during the block.

        If libvirt on a host does not accept the listener, the downtime stays unknown.
        """
        async with AsyncExitStack() as stack:
            for host, take in ((source, self.on_source), (target, self.on_target)):
                await stack.enter_async_context(_listening(host, take))
            yield

    def on_source(self, _: object, domain: Any, event: int, *__: object) -> None:
        """Record a pause. Called by libvirt."""
        if event == libvirt.VIR_DOMAIN_EVENT_SUSPENDED and domain.UUIDString() == self._uuid:
            self._paused.append(time.monotonic())

    def on_target(self, _: object, domain: Any, event: int, *__: object) -> None:
        """Record a resume. Called by libvirt."""
        if event == libvirt.VIR_DOMAIN_EVENT_RESUMED and domain.UUIDString() == self._uuid:
            self._resumed.append(time.monotonic())


@asynccontextmanager
async def _listening(host: Hypervisor, take: Any) -> AsyncIterator[None]:
    # The guest does not exist on the target yet, so events of all guests are received.
    def register(connection: libvirt.virConnect) -> int:
        kind = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
        number: int = connection.domainEventRegisterAny(None, kind, take, None)
        return number

    number: int | None = None
    with suppress(HypervisorError):
        number = await host.query("listening to the guest's events", register)
    try:
        yield
    finally:
        if number is not None:
            last = number
            # A connection with a listener stays open in libvirtd after it was closed.
            with suppress(HypervisorError):
                await host.query(
                    "removing the event listener", lambda c: c.domainEventDeregisterAny(last)
                )
