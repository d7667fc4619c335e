"""Switch guests off in order, and on again."""

import asyncio

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Seconds, show_seconds

_POLL = 0.5
_AGAIN = Seconds(10.0)
"""A guest that has just begun to boot does not hear its power button."""


async def shut_down(hypervisor: Hypervisor, uuid: str, limit: Seconds) -> None:
    """Ask a guest to shut down and wait until it has. Never ends it by force.

    Raises HypervisorError if it has not after `limit`: it may still be at it.
    """

    def ask(connection: libvirt.virConnect) -> None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.isActive():
            domain.shutdown()

    def active(connection: libvirt.virConnect) -> bool:
        return bool(connection.lookupByUUIDString(uuid).isActive())

    loop = asyncio.get_running_loop()
    until, asked = loop.time() + limit, -_AGAIN
    while True:
        if loop.time() - asked >= _AGAIN:
            await hypervisor.command("shutting a guest down", ask)
            asked = loop.time()
        if not await hypervisor.ask("looking whether a guest is off", active):
            return
        if loop.time() > until:
            raise HypervisorError(
                f"it has not shut down in {show_seconds(limit)}", host=hypervisor.host.name
            )
        await asyncio.sleep(_POLL)


async def suspend(hypervisor: Hypervisor, uuid: str) -> None:
    """Save a guest's memory on its host and end its QEMU: `start` lets it go on where it stood.

    Takes as long as the disk needs for its memory. Raises HypervisorError: it runs on then.
    """

    def change(connection: libvirt.virConnect) -> None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.isActive():
            domain.managedSave()

    await hypervisor.long_command("suspending a guest", change)


async def is_saved(hypervisor: Hypervisor, uuid: str) -> bool:
    """Whether a guest that is off goes on from saved memory next. Raises HypervisorError."""
    return await hypervisor.ask(
        "looking for saved memory",
        lambda connection: bool(connection.lookupByUUIDString(uuid).hasManagedSaveImage()),
    )


async def move_offline(
    hypervisor: Hypervisor, uuid: str, target: str, xml: str | None = None
) -> None:
    """Define a guest that is off at another libvirt (a URI as seen from this host), and forget it
    here. `xml`: as it is to be there; None: as it is. Raises HypervisorError, also if it is off no
    more; OutcomeUnknown: look at both."""
    given = {}
    if xml is not None:
        # Which of them counts for a guest that is off has changed between versions of libvirt.
        given = {
            libvirt.VIR_MIGRATE_PARAM_DEST_XML: xml, libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: xml,
        }  # fmt: skip
    flags = (
        libvirt.VIR_MIGRATE_OFFLINE | libvirt.VIR_MIGRATE_PERSIST_DEST
        | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE | libvirt.VIR_MIGRATE_PEER2PEER
    )  # fmt: skip

    def change(connection: libvirt.virConnect) -> None:
        domain = connection.lookupByUUIDString(uuid)
        # libvirt would let a guest run on that is defined there no more, and leave memory behind.
        if domain.isActive():
            raise HypervisorError("it was started meanwhile", host=hypervisor.host.name)
        if domain.hasManagedSaveImage():
            raise HypervisorError("its memory was saved meanwhile", host=hypervisor.host.name)
        domain.migrateToURI3(target, given, flags)

    await hypervisor.command("moving a guest that is off", change)


async def start(hypervisor: Hypervisor, uuid: str) -> str | None:
    """Start a guest that is defined there; its name, None if it runs already.

    Raises HypervisorError.
    """

    def change(connection: libvirt.virConnect) -> str | None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.isActive():
            return None
        domain.create()
        return str(domain.name())

    return await hypervisor.command("starting a guest", change)
