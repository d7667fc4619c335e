"""A running guest's disks in QEMU: sizes, image versions, dirty bitmaps, block pull."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

import libvirt
import libvirt_qemu

from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.qmp import DomainCaller
from vmckpt.model.disk import Bitmap, DiskFacts
from vmckpt.units import Bytes

_VERSIONS = {"0.10": 2, "1.1": 3}
_NODES = {"execute": "query-named-block-nodes", "arguments": {"flat": True}}

Nodes = Mapping[str, Mapping[str, Any]]


def nodes(domain: libvirt.virDomain) -> Nodes:
    """Return QEMU's block nodes by name. Raises libvirtError; LookupError if QEMU refuses."""
    answer = libvirt_qemu.qemuMonitorCommand(domain, json.dumps(_NODES), 0)
    return {str(node["node-name"]): node for node in json.loads(answer)["return"]}


def remove_bitmap(domain: libvirt.virDomain, node: str, name: str) -> str | None:
    """Remove a dirty bitmap that is unknown to libvirt. Raises libvirtError.

    `node`: name of the block node in QEMU; `name`: the bitmap's name. Returns QEMU's reason if QEMU
    refuses, otherwise None.
    """
    order = {"execute": "block-dirty-bitmap-remove", "arguments": {"node": node, "name": name}}
    answer = json.loads(libvirt_qemu.qemuMonitorCommand(domain, json.dumps(order), 0))
    return str(answer["error"]["desc"]) if "error" in answer else None


def read_facts(xml: str, known: Nodes) -> tuple[DiskFacts, ...]:
    """Return the disks of a domain XML with what QEMU reports about them.

    `known`: QEMU's block nodes; empty if the guest is off. Raises ValueError.
    """
    disks = domain_xml.tree(xml, "domain").findall("devices/disk")
    return tuple(_facts(disk, known) for disk in disks)


def _facts(disk: ET.Element, known: Nodes) -> DiskFacts:
    source, target, driver = disk.find("source"), disk.find("target"), disk.find("driver")
    node = _node(source, known)
    image = known[node].get("image", {}) if node is not None else {}
    size = image.get("virtual-size")
    data = image.get("format-specific", {}).get("data", {})
    return DiskFacts(
        name=target.get("dev", "?") if target is not None else "?",
        kind=disk.get("type", "file"),
        device=disk.get("device", "disk"),
        # libvirt does not probe formats; it assumes raw if the XML names no format.
        format=driver.get("type", "raw") if driver is not None else "raw",
        source=_source(source),
        read_only=disk.find("readonly") is not None,
        shareable=disk.find("shareable") is not None,
        size=None if size is None else Bytes(domain_xml.count(size, "the disk's size")),
        version=_VERSIONS.get(str(data.get("compat"))),
        node=node,
        bitmaps=tuple(_bitmaps(known[node])) if node is not None else (),
        base=domain_xml.base(disk),
    )


def _source(source: ET.Element | None) -> str | None:
    if source is None:
        return None
    keys = ("file", "dev", "name", "volume", "dir", "path")
    return next((source.get(key) for key in keys if source.get(key)), None)


def _node(source: ET.Element | None, known: Nodes) -> str | None:
    """Return the name of a disk's top node; None if QEMU has no such node.

    libvirt numbers a disk's nodes, and omits a format node that would have no effect.
    """
    number = source.get("index") if source is not None else None
    found = (f"libvirt-{number}-{layer}" for layer in ("format", "storage"))
    return next((name for name in found if name in known), None)


def _bitmaps(node: Mapping[str, Any]) -> Iterator[Bitmap]:
    for one in node.get("dirty-bitmaps", ()):
        if "name" in one:  # bitmaps of QEMU's own jobs have no name
            yield Bitmap(
                name=str(one["name"]),
                recording=bool(one.get("recording")),
                persistent=bool(one.get("persistent")),
                busy=bool(one.get("busy")),
                inconsistent=bool(one.get("inconsistent", False)),
            )


@dataclass(frozen=True, slots=True)
class Pull:
    """Progress of a block pull, in bytes."""

    done: int
    total: int


def start_pull(caller: DomainCaller, disk: str) -> None:
    """Start a block pull, which copies a disk's backing file into its image.

    QEMU continues the pull in the background. Raises HypervisorError, OutcomeUnknown.
    """
    caller.on_domain("starting a block pull", lambda domain: domain.blockPull(disk), changes=True)


def progress(caller: DomainCaller, disk: str) -> Pull | None:
    """Return the progress of a disk's block pull; None if no pull is running.

    Raises HypervisorError.
    """
    told = caller.on_domain("reading a block job", lambda domain: domain.blockJobInfo(disk))
    if not told:
        return None
    return Pull(int(told.get("cur", 0)), int(told.get("end", 0)))


def stopped_by_disk(caller: DomainCaller) -> bool:
    """Return whether an I/O error on a disk has paused the guest. Raises HypervisorError."""
    state = caller.on_domain("reading the guest's state", lambda domain: domain.state())
    return tuple(state) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)
