"""Describe the captured guest for the snapshot's manifest."""

from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

from vmckpt.agent.orders import CreateOrder
from vmckpt.agent.snapshot.memory_methods import Memory
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.hypervisor import definition_text, domain_xml
from vmckpt.model.disk import DiskFacts
from vmckpt.model.guest import Guest
from vmckpt.replication.backup import standby_xml
from vmckpt.store.format.chunk_map import Kind
from vmckpt.store.format.metadata import Contents, DiskMake, PrivateFacts, Public, RamBlock
from vmckpt.store.format.private_part import Private

_LONGEST, _MOST = 255, 64
"""Limits for warnings in a manifest: characters per warning, and number of warnings."""


def facts(
    xml: str, disks: Sequence[DiskFacts], image: FrozenImage | None, *, agent: bool
) -> PrivateFacts:
    """Return the private metadata, which an encrypted snapshot stores in encrypted form.

    `agent`: whether the guest agent, which is then also in the captured memory, answers. Raises
    ValueError if the XML is invalid.
    """
    guest = _described(xml)
    return PrivateFacts(
        domain_xml=_with_bases(standby_xml.since_takeover(xml), disks),
        cpu_xml=guest.cpu_xml,
        boot_files=guest.boot_files,
        ram=tuple(
            RamBlock(name=one.name, size=one.size) for one in (image.blocks if image else ())
        ),
        disks=tuple(
            DiskMake(target=one.name, format=one.format, size=one.size or 0, options="")
            for one in disks
        ),
        agent={"guest-ping": "answered"} if agent else {},
    )


def _with_bases(xml: str, disks: Sequence[DiskFacts]) -> str:
    """Return the definition with the backing file of each disk that has one.

    libvirt omits backing files that it found itself from the XML that can be restored.
    """
    bases = {disk.name: disk.base for disk in disks if disk.base is not None}
    if not bases:
        return xml
    root = domain_xml.tree(xml, "domain")
    for disk in root.findall("devices/disk"):
        target = disk.find("target")
        base = bases.get("" if target is None else target.get("dev", ""))
        if base is not None and domain_xml.base(disk) is None:
            for node in disk.findall("backingStore"):
                disk.remove(node)
            backing = ET.SubElement(disk, "backingStore", type="file")
            ET.SubElement(backing, "format", type=base[1])
            ET.SubElement(backing, "source", file=base[0])
    return definition_text.text(root, xml)


def public(
    order: CreateOrder,
    private: Private,
    *,
    made_at: float,
    qemu: str,
    parent: str | None,
    epoch: int,
    new: int,
) -> Public:
    """Return the metadata that is readable without a key.

    `made_at`: Unix time of the capture, in seconds; `new`: bytes added to the store. Raises
    ValueError if the XML is invalid.
    """
    guest = _described(private.facts.domain_xml)
    return Public(
        id=order.snapshot,
        name=order.name,
        guest=guest.name,
        guest_uuid=order.guest,
        contents=Contents.MEMORY if order.memory else Contents.DISKS,
        made_at=made_at,
        by=order.by,
        host=order.host,
        parent=parent,
        group=order.group,
        memory=sum(one.size for one in private.regions if one.kind is Kind.RAM),
        disks=sum(one.size for one in private.regions if one.kind is Kind.DISK),
        new=new,
        qemu=qemu,
        machine=guest.machine,
        accelerator=guest.accelerator,
        arch=guest.arch,
        epoch=epoch,
        owner=order.owner,
        tags=dict(order.tags),
    )


def _described(xml: str) -> Guest:
    return domain_xml.guest(xml, state=1, persistent=True, autostart=False, snapshots=0, job=None)


def way(memory: Memory | None, *, off: bool) -> dict[str, Any]:
    """Return the CreateResult fields that describe the memory capture. `off`: the guest is off."""
    if memory is None:
        return {
            "pause": 0.0, "phases": {}, "way": "disks",
            "why": "the guest is off" if off else "a snapshot without memory was requested",
        }  # fmt: skip
    phases = memory.phases or {}
    return {
        "pause": memory.pause, "way": memory.way, "why": memory.why, "phases": dict(phases),
    }  # fmt: skip


def warnings(told: Sequence[str]) -> tuple[str, ...]:
    """Return the warnings, truncated and cleaned, so none of them makes the manifest invalid."""
    printable = ("".join(one if one.isprintable() else " " for one in text) for text in told)
    return tuple(text[:_LONGEST] for text in printable)[:_MOST]
