"""What a host has stored of a guest that came back there: put right if it is missing or old."""

from collections.abc import Callable
from dataclasses import dataclass

import libvirt

from vmckpt.hypervisor.connection import Hypervisor

_STORED = libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE


@dataclass(frozen=True, slots=True)
class Found:
    """How a host knows a guest."""

    active: bool
    stored: str | None
    """Its stored definition; None: it has none."""


async def look(hypervisor: Hypervisor, uuid: str) -> Found | None:
    """None if the host does not know the guest. Raises HypervisorError."""

    def read(connection: libvirt.virConnect) -> Found | None:
        domain = _found(connection, uuid)
        return None if domain is None else Found(bool(domain.isActive()), _text(domain))

    return await hypervisor.ask("reading the guest's definition", read)


async def put_right(
    hypervisor: Hypervisor, uuid: str, decide: Callable[[str | None], str | None]
) -> bool:
    """Store what `decide` makes of the stored definition, if it makes anything; whether it did.

    The running guest stays as it is. Raises HypervisorError, OutcomeUnknown.
    """

    def change(connection: libvirt.virConnect) -> bool:
        domain = _found(connection, uuid)
        wanted = decide(None if domain is None else _text(domain))
        if wanted is not None:
            connection.defineXML(wanted)
        return wanted is not None

    return await hypervisor.command("storing the guest's definition", change)


def _found(connection: libvirt.virConnect, uuid: str) -> libvirt.virDomain | None:
    try:
        return connection.lookupByUUIDString(uuid)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return None
        raise


def _text(domain: libvirt.virDomain) -> str | None:
    return domain.XMLDesc(_STORED) if domain.isPersistent() else None
