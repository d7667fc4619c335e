"""Shut guests down and start them; why libvirt says one ended, and which devices were plugged."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import Any, Self

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import connection
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
            await hypervisor.execute("shutting a guest down", ask)
            asked = loop.time()
        if not await hypervisor.query("looking whether a guest is off", active):
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

    await hypervisor.execute_long("suspending a guest", change)


async def is_saved(hypervisor: Hypervisor, uuid: str) -> bool:
    """Whether a guest that is off goes on from saved memory next. Raises HypervisorError."""
    return await hypervisor.query(
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

    await hypervisor.execute("moving a guest that is off", change)


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

    return await hypervisor.execute("starting a guest", change)


class Ending(StrEnum):
    """What libvirt says about it."""

    WISHED = "wished"
    """Shut down from inside or outside, destroyed, saved, migrated away, or it panicked."""
    DIED = "died"
    """Nobody asked for it."""


class Endings:
    """Listens for a guest's end. Use as `with Endings(uuid, uri=...) as endings`."""

    def __init__(self, guest: str, *, uri: str) -> None:
        self._guest, self._uri = guest, uri
        self.on_device: Callable[[str, bool], None] | None = None
        """Called in libvirt's thread with libvirt's alias of a device, and whether it was plugged
        in. It must not call libvirt."""
        self._told = threading.Event()
        self._ending = Ending.DIED
        self._connection: libvirt.virConnect | None = None

    def __enter__(self) -> Self:
        """A libvirt that cannot be reached tells nothing: then its QEMU died, for all we know."""
        connection.start()
        self._listen()
        return self

    def keep(self) -> None:
        """Listen again if libvirt was started anew; to be called now and then."""
        alive = False
        with suppress(libvirt.libvirtError):
            alive = self._connection is not None and self._connection.isAlive() == 1
        if not alive:
            self._listen()

    def _listen(self) -> None:
        with suppress(libvirt.libvirtError):
            self._connection = libvirt.open(connection.without_questions(self._uri))
            domain = self._connection.lookupByUUIDString(self._guest)
            for kind, take in (
                (libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, self._take),
                (libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_ADDED, self._plugged_in),
                (libvirt.VIR_DOMAIN_EVENT_ID_DEVICE_REMOVED, self._plugged_out),
            ):
                self._connection.domainEventRegisterAny(domain, kind, take, None)

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            with suppress(libvirt.libvirtError):
                self._connection.close()

    def _take(self, _: object, __: object, event: int, detail: int, ___: Any) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_CRASHED:
            self._ending = Ending.WISHED
            self._told.set()
        if event == libvirt.VIR_DOMAIN_EVENT_STOPPED:
            died = detail == libvirt.VIR_DOMAIN_EVENT_STOPPED_FAILED
            self._ending = Ending.DIED if died else Ending.WISHED
            self._told.set()

    def _plugged_in(self, _: object, __: object, device: str, ___: Any) -> None:
        self._tell(device, True)

    def _plugged_out(self, _: object, __: object, device: str, ___: Any) -> None:
        self._tell(device, False)

    def _tell(self, device: str, plugged: bool) -> None:
        listener = self.on_device
        if listener is not None:
            listener(device, plugged)

    def how(self, limit: Seconds) -> Ending:
        """How it ended, which it has; what is not told in that time was nobody's wish."""
        self._told.wait(limit)
        return self._ending
