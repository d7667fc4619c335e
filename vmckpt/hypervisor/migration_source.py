"""What the source of a migration reports about the guest beyond its stored definition."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import libvirt
import libvirt_qemu

from vmckpt.definition.needs import Resource, needs
from vmckpt.hypervisor import backup, block, domain_xml, storage
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import Checkpoint

_MIGRATABLE = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE
_QUERY = json.dumps({"execute": "query-migrate"})
_MOST = 20
"""Maximum number of reasons that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceAnswers:
    """The answers of the source's libvirt and QEMU."""

    xml: str = ""
    """The running guest's XML as libvirt would send it; empty: unknown. Contains passwords unless
    the connection is read-only."""
    needs: tuple[Resource, ...] = ()
    blocked: tuple[str, ...] = ()
    """Why QEMU cannot migrate the guest, in QEMU's words ("blocked-reasons" of query-migrate)."""
    data_files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """External data files of qcow2 images, by the disk's name in the guest."""
    volumes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Path of each disk that is a volume of a storage pool, by the disk's name in the guest."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Checkpoints of other tools, parents first. libvirt does not migrate checkpoints."""


async def ask_source(hypervisor: Hypervisor, uuid: str) -> SourceAnswers:
    """Ask the source about a running guest. Raises HypervisorError.

    QEMU is not asked over a read-only connection, or if the guest is off: `blocked` and
    `data_files` are then empty.
    """
    read_only = hypervisor.host.read_only

    def read(connection: libvirt.virConnect) -> SourceAnswers:
        domain = connection.lookupByUUIDString(uuid)
        xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_MIGRATABLE if read_only else _MIGRATABLE)
        root = domain_xml.tree(xml, "domain")
        asked = not read_only and bool(domain.isActive())
        return SourceAnswers(
            xml=xml, needs=needs(root), volumes=storage.volume_paths(connection, xml),
            blocked=tuple(_blocked(domain)) if asked else (),
            data_files=_data_files(domain) if asked else {},
            checkpoints=tuple(one for one in backup.list_checkpoints(domain) if not one.ours),
        )  # fmt: skip

    return await hypervisor.query("reading what the guest needs", read)


def _blocked(domain: libvirt.virDomain) -> Iterator[str]:
    """Yield QEMU's reasons against a migration.

    QEMU before version 6.0 gives no reasons; then libvirt decides.
    """
    answer: Any = json.loads(libvirt_qemu.qemuMonitorCommand(domain, _QUERY, 0)).get("return", {})
    for reason in answer.get("blocked-reasons", [])[:_MOST]:
        yield " ".join(str(reason).split())


def _data_files(domain: libvirt.virDomain) -> dict[str, str]:
    """Return the external data files, which libvirt's XML names only since version 10.10."""
    found = {}
    known = block.nodes(domain)
    for disk in block.read_facts(domain.XMLDesc(), known):
        if disk.node is not None:
            image = known[disk.node].get("image", {})
            path = image.get("format-specific", {}).get("data", {}).get("data-file")
            if isinstance(path, str) and path.startswith("/"):
                found[disk.name] = path
    return found
