"""The libvirt XML of a standby, and of the guest after a takeover. Pure.

Invalid XML raises ValueError, as in `domain_xml`.
"""

from collections.abc import Collection, Mapping
from itertools import pairwise
from xml.etree import ElementTree as ET

from vmckpt.definition.host_resources import WAITING
from vmckpt.hypervisor import definition_text, domain_xml
from vmckpt.replication.protocol.memory_layout import Dimm

QEMU = "http://libvirt.org/schemas/domain/qemu/1.0"
MARK = domain_xml.STANDBY
_USERS = "ua-"
"""Prefix of the aliases that users have chosen for devices."""


def standby(
    xml: str, images: Mapping[str, str], session: str, *, shares_memory: bool = False
) -> str:
    """Return the XML of a guest's standby, which waits for memory.

    The standby has its own disks, its network links are down, and its metadata marks it as the
    standby of `session`. `images`: image path of each replicated disk, by disk name.
    `shares_memory`: its memory can be mapped, even if the guest's cannot. Raises ValueError if
    `xml` is not the XML of a domain.
    """
    root = plain(xml)
    place(root, images)
    if shares_memory:
        share_memory(root)
    for card in root.findall("devices/interface"):
        link = card.find("link")
        link = ET.SubElement(card, "link") if link is None else link
        link.set("state", "down")
        _forget_tap(card)
    metadata = root.find("metadata")
    metadata = ET.SubElement(root, "metadata") if metadata is None else metadata
    mark = ET.SubElement(metadata, f"{{{MARK}}}standby")
    mark.set("session", session)
    wait(root)
    ET.register_namespace("vmckpt-standby", MARK)
    return definition_text.text(root, xml)


def share_memory(root: ET.Element) -> None:
    """Put private memory of a guest into a memfd, so that it can be mapped.

    Memory that is shared already stays where it is.
    """
    backing = root.find("memoryBacking")
    backing = ET.SubElement(root, "memoryBacking") if backing is None else backing
    for device in root.findall("devices/memory[@access]"):
        device.set("access", "shared")
    access = backing.find("access")
    if access is not None and access.get("mode") == "shared" and _is_file(backing):
        return
    for tag in ("source", "access"):
        for node in backing.findall(tag):
            backing.remove(node)
    ET.SubElement(backing, "source").set("type", "memfd")
    ET.SubElement(backing, "access").set("mode", "shared")
    for cell in root.findall("cpu/numa/cell[@memAccess]"):
        cell.set("memAccess", "shared")


def dimm(one: Dimm, *, nodes: bool) -> str:
    """Return the XML of a DIMM that can be mapped, as the guest has it.

    `nodes`: the guest has NUMA nodes.
    """
    device = ET.Element("memory", {"model": "dimm", "access": "shared"})
    if one.name.startswith(_USERS):  # libvirt itself derives other names from the slot
        ET.SubElement(device, "alias", {"name": one.name})
    target = ET.SubElement(device, "target")
    ET.SubElement(target, "size", {"unit": "b"}).text = str(one.size)
    if nodes:
        ET.SubElement(target, "node").text = str(one.node)
    where = {"type": "dimm", "slot": str(one.slot), "base": f"{one.address:#x}"}
    ET.SubElement(device, "address", where)
    return ET.tostring(device, encoding="unicode")


def has_nodes(xml: str) -> bool:
    """Return whether a guest has NUMA nodes. Raises ValueError if the XML is invalid."""
    return domain_xml.tree(xml, "domain").find("cpu/numa/cell") is not None


def _is_file(backing: ET.Element) -> bool:
    source = backing.find("source")
    return source is not None and source.get("type") in ("file", "memfd")


def wait(root: ET.Element) -> None:
    """Make the guest's QEMU wait for memory and device state when it is started."""
    line = root.find(f"{{{QEMU}}}commandline")
    line = ET.SubElement(root, f"{{{QEMU}}}commandline") if line is None else line
    for word in WAITING:
        ET.SubElement(line, f"{{{QEMU}}}arg").set("value", word)
    ET.register_namespace("qemu", QEMU)


def clean(xml: str, images: Mapping[str, str]) -> str:
    """Return the definition to store once the guest is running on the backup.

    A guest that is started again from this definition boots, and does not wait for memory. Raises
    ValueError if the XML is invalid.
    """
    root = plain(xml)
    place(root, images)
    ET.register_namespace("qemu", QEMU)
    return definition_text.text(root, xml)


def since_takeover(xml: str) -> str:
    """Return the XML of a running guest without what remains from its time as a standby.

    Started from its own XML, a guest that has failed over would wait for memory. The XML of other
    guests is returned unchanged. Raises ValueError if the XML is invalid.
    """
    if not any(word in xml for word in (MARK, WAITING[0])):
        return xml
    ET.register_namespace("qemu", QEMU)
    return definition_text.text(plain(xml), xml)


def plain(xml: str) -> ET.Element:
    """Parse a guest's XML, and remove the parts that remain from an earlier standby.

    Raises ValueError if the XML is invalid.
    """
    root = domain_xml.tree(xml, "domain")
    root.attrib.pop("id", None)
    line = root.find(f"{{{QEMU}}}commandline")
    if line is not None:
        words = list(line.findall(f"{{{QEMU}}}arg"))
        for first, second in pairwise(words):
            if (first.get("value"), second.get("value")) == WAITING:
                line.remove(first)
                line.remove(second)
        if not len(line):
            root.remove(line)
    for metadata in root.findall("metadata"):
        for mark in metadata.findall(f"{{{MARK}}}standby"):
            metadata.remove(mark)
    return root


def place(root: ET.Element, images: Mapping[str, str]) -> None:
    """Replace the images of disks. `images`: image path of each disk, by its name in the guest."""
    for disk in root.findall("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        name = target.get("dev", "") if target is not None else ""
        if name not in images or source is None:
            continue
        source.attrib.clear()
        domain_xml.another_image(source)
        disk.set("type", "file")
        source.set("file", images[name])
        for node in disk.findall("backingStore"):
            disk.remove(node)


def with_owners_kept(xml: str, shared: Collection[str]) -> str:
    """Return the XML with relabelling off for `shared` disks, so that libvirt keeps their owners.

    QEMU on another host uses these images, and reopens them for each epoch. `shared`: names of the
    disks in the guest. Raises ValueError if the XML is invalid.
    """
    if not shared:
        return xml
    root = domain_xml.tree(xml, "domain")
    for disk in root.findall("devices/disk[@type='file']"):
        target, source = disk.find("target"), disk.find("source")
        if target is None or source is None or target.get("dev") not in shared:
            continue
        for label in source.findall("seclabel[@model='dac']"):
            source.remove(label)
        ET.SubElement(source, "seclabel", {"model": "dac", "relabel": "no"})
    ET.register_namespace("qemu", QEMU)
    return definition_text.text(root, xml)


def plugged(xml: str) -> list[str]:
    """Return the XML of each network card of a running standby, with its link up.

    Raises ValueError if the XML is invalid.
    """
    found = []
    for card in domain_xml.tree(xml, "domain").findall("devices/interface"):
        for link in card.findall("link"):
            card.remove(link)
        ET.SubElement(card, "link").set("state", "up")
        found.append(ET.tostring(card, encoding="unicode"))
    return found


def marked(xml: str) -> str | None:
    """Return the session in a standby's metadata; None: the guest is not a standby.

    Raises ValueError if the XML is invalid.
    """
    return domain_xml.standby_of(domain_xml.tree(xml, "domain"))


def _forget_tap(card: ET.Element) -> None:
    """Remove the name of the host's tap device: the other host has its own device."""
    for target in card.findall("target"):
        if target.get("dev", "").startswith(("vnet", "macvtap")):
            card.remove(target)
