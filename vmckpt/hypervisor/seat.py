"""From where calls on one guest are made: a thread on its host, or a controller's lane."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import libvirt

from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Seconds

T = TypeVar("T")


class Seat(Protocol):
    """One guest and how it is called. libvirt's errors become ours there or above it."""

    @property
    def host(self) -> str: ...

    def on_domain(
        self, what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        """Raises HypervisorError, and OutcomeUnknown if `changes`."""


class _Lane:
    """In the thread of a lane, which makes ours of libvirt's errors itself."""

    def __init__(self, host: str, domain: libvirt.virDomain) -> None:
        self.host, self._domain = host, domain

    def on_domain(
        self, _what: str, call: Callable[[libvirt.virDomain], T], *, changes: bool = False
    ) -> T:
        del changes
        return call(self._domain)


async def at(
    hypervisor: Hypervisor,
    uuid: str,
    what: str,
    call: Callable[[Seat], T],
    *,
    changes: bool,
    limit: Seconds = Seconds(40.0),
) -> T:
    """Do from afar what is made for a seat, as `lambda seat: Backups(seat).opened()`.

    Raises HypervisorError, and OutcomeUnknown if it changes something.
    """

    def run(connection: libvirt.virConnect) -> T:
        return call(_Lane(hypervisor.host.name, connection.lookupByUUIDString(uuid)))

    if changes:
        return await hypervisor.command(what, run, limit=limit)
    return await hypervisor.ask(what, run, limit=limit)
