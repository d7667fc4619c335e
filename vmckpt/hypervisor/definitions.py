"""A guest's stored definition, read and replaced as a whole."""

from dataclasses import dataclass
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import blocks, parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import DiskFacts

_SECURE = libvirt.VIR_DOMAIN_XML_SECURE
_STORED = _SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """How a guest is to be, and how it is."""

    text: str
    """The stored one, as libvirt told it."""
    stored: ET.Element
    running: ET.Element | None
    """None: it is off."""
    disks: tuple[DiskFacts, ...]


async def read(hypervisor: Hypervisor, uuid: str) -> Definition:
    """Raises HypervisorError, also for a guest without a stored definition."""

    def look(connection: libvirt.virConnect) -> Definition | None:
        domain = connection.lookupByUUIDString(uuid)
        if not domain.isPersistent():
            return None
        active = bool(domain.isActive())
        known = blocks.nodes(domain) if active else {}
        text = domain.XMLDesc(_STORED)
        return Definition(
            text=text,
            stored=parse.tree(text, "domain"),
            running=parse.tree(domain.XMLDesc(_SECURE), "domain") if active else None,
            disks=blocks.read_facts(domain.XMLDesc(), known),
        )

    found = await hypervisor.ask("reading the guest's definition", look)
    if found is None:
        name = hypervisor.host.name
        raise HypervisorError(
            f"{name}: the guest {uuid} has no stored definition that could be changed",
            host=name,
            mend="define it with virsh define",
        )
    return found


async def write(hypervisor: Hypervisor, uuid: str, xml: str, *, instead_of: str) -> None:
    """Replace a stored definition, unless somebody has changed it since it was read.

    The running guest stays as it is. Raises HypervisorError and OutcomeUnknown.
    """

    def change(connection: libvirt.virConnect) -> bool:
        if connection.lookupByUUIDString(uuid).XMLDesc(_STORED) != instead_of:
            return False
        connection.defineXML(xml)
        return True

    if not await hypervisor.command("changing the guest's definition", change):
        name = hypervisor.host.name
        raise HypervisorError(
            f"{name}: somebody has changed the guest's definition meanwhile; nothing was done",
            host=name,
            mend="try again",
        )
