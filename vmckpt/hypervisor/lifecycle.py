"""Start, shut down and save guests, move guests that are off, and listen for a guest's events."""

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
"""Interval between requests: a guest that has just started to boot ignores its power button."""


async def shut_down(hypervisor: Hypervisor, uuid: str, limit: Seconds) -> None:
    """Ask a guest to shut down, and wait until it is off. Never destroys the guest.

    Raises HypervisorError, also if the guest is not off within `limit`; it may still shut down
    later. Raises ReadOnly.
    """

    def ask(connection: libvirt.virConnect) -> None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.isActive():
            domain.shutdown()

    def running(connection: libvirt.virConnect) -> str | None:
        domain = connection.lookupByUUIDString(uuid)
        return str(domain.name()) if domain.isActive() else None

    loop = asyncio.get_running_loop()
    until, asked = loop.time() + limit, -_AGAIN
    while True:
        if loop.time() - asked >= _AGAIN:
            await hypervisor.execute("shutting a guest down", ask)
            asked = loop.time()
        if (name := await hypervisor.query("reading a guest's state", running)) is None:
            return
        if loop.time() > until:
            host = hypervisor.host.name
            raise HypervisorError(
                f"{name} on {host} did not shut down within {show_seconds(limit)}", host=host
            )
        await asyncio.sleep(_POLL)


async def suspend(hypervisor: Hypervisor, uuid: str) -> None:
    """Save a guest's memory on its host and stop its QEMU; `start` resumes the saved guest.

    Takes as long as writing the memory to disk. Raises HypervisorError; the guest then keeps
    running. Raises ReadOnly, and OutcomeUnknown if the connection broke.
    """

    def change(connection: libvirt.virConnect) -> None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.isActive():
            domain.managedSave()

    await hypervisor.execute_long("suspending a guest", change)


async def is_saved(hypervisor: Hypervisor, uuid: str) -> bool:
    """Return whether a guest has saved memory from which it starts. Raises HypervisorError."""
    return await hypervisor.query(
        "looking for saved memory",
        lambda connection: bool(connection.lookupByUUIDString(uuid).hasManagedSaveImage()),
    )


async def move_offline(
    hypervisor: Hypervisor, uuid: str, target: str, xml: str | None = None
) -> None:
    """Move the definition of a guest that is off to another host.

    `target`: the other libvirt's URI as seen from this host. `xml`: the definition to store there;
    None: unchanged. Raises HypervisorError, also if the guest was started or saved meanwhile.
    Raises ReadOnly, and OutcomeUnknown if either host may have the definition.
    """
    given = {}
    if xml is not None:
        # Versions of libvirt differ in which of the two applies to a guest that is off.
        given = {
            libvirt.VIR_MIGRATE_PARAM_DEST_XML: xml, libvirt.VIR_MIGRATE_PARAM_PERSIST_XML: xml,
        }  # fmt: skip
    flags = (
        libvirt.VIR_MIGRATE_OFFLINE | libvirt.VIR_MIGRATE_PERSIST_DEST
        | libvirt.VIR_MIGRATE_UNDEFINE_SOURCE | libvirt.VIR_MIGRATE_PEER2PEER
    )  # fmt: skip

    def change(connection: libvirt.virConnect) -> None:
        domain, host = connection.lookupByUUIDString(uuid), hypervisor.host.name
        # libvirt would undefine a running guest here, and would not move saved memory.
        if domain.isActive():
            raise HypervisorError(
                f"{domain.name()} was started on {host} in the meantime", host=host
            )
        if domain.hasManagedSaveImage():
            raise HypervisorError(
                f"the memory of {domain.name()} was saved on {host} in the meantime", host=host
            )
        domain.migrateToURI3(target, given, flags)

    await hypervisor.execute("moving a guest that is off", change)


async def start(hypervisor: Hypervisor, uuid: str) -> str | None:
    """Start a guest that is defined on the host.

    Returns its name; None if it is already running. Raises HypervisorError, OutcomeUnknown,
    ReadOnly.
    """

    def change(connection: libvirt.virConnect) -> str | None:
        domain = connection.lookupByUUIDString(uuid)
        if domain.isActive():
            return None
        domain.create()
        return str(domain.name())

    return await hypervisor.execute("starting a guest", change)


class Ending(StrEnum):
    """How a guest stopped, according to libvirt."""

    WISHED = "wished"
    """The guest was shut down, destroyed, saved or migrated, or it panicked."""
    DIED = "died"
    """The guest's QEMU failed, or libvirt reported nothing."""


class Endings:
    """A listener for a guest's stop and hotplug events.

    Use as `with Endings(uuid, uri="qemu:///system") as endings`.
    """

    def __init__(self, guest: str, *, uri: str) -> None:
        self._guest, self._uri = guest, uri
        self.on_device: Callable[[str, bool], None] | None = None
        """Called with a device's alias, and True if the device was plugged in, False if unplugged.

        The callback runs in libvirt's event thread, so it must not call libvirt.
        """
        self._told = threading.Event()
        self._ending = Ending.DIED
        self._connection: libvirt.virConnect | None = None

    def __enter__(self) -> Self:
        """Start to listen.

        If libvirt cannot be reached, `how` returns DIED, unless a later `keep` succeeds.
        """
        connection.start()
        self._listen()
        return self

    def keep(self) -> None:
        """Listen again if libvirt was restarted. Call this from time to time."""
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
        """Return how the guest stopped. Call this when the guest's QEMU has terminated.

        Waits up to `limit` for libvirt's event. Without an event, returns DIED.
        """
        self._told.wait(limit)
        return self._ending
