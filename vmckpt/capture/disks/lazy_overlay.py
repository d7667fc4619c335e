"""The definition of a guest that is started on empty images (lazy restore). Pure."""

from collections.abc import Mapping
from xml.etree import ElementTree as ET

from vmckpt.hypervisor import definition_text, domain_xml


def behind(xml: str, sockets: Mapping[str, str]) -> str:
    """Return the definition with the NBD exports at `sockets` (by disk) as backing files.

    If the NBD server is unavailable, a read pauses the guest instead of causing an I/O error.
    Raises ValueError if the guest lacks one of the disks, or if the XML is invalid.
    """
    root = domain_xml.tree(xml, "domain")
    left = set(sockets)
    for disk in root.findall("devices/disk"):
        target, driver = disk.find("target"), disk.find("driver")
        name = target.get("dev", "") if target is not None else ""
        if name not in sockets:
            continue
        left.discard(name)
        if driver is None:
            driver = ET.SubElement(disk, "driver", name="qemu")
        driver.set("type", "qcow2")
        driver.set("error_policy", "stop")
        driver.set("rerror_policy", "stop")
        for node in disk.findall("backingStore"):
            disk.remove(node)
        store = ET.SubElement(disk, "backingStore", type="network")
        ET.SubElement(store, "format", type="raw")
        source = ET.SubElement(store, "source", protocol="nbd", name=name)
        ET.SubElement(source, "host", transport="unix", socket=sockets[name])
    if left:
        raise ValueError(f"the guest has no disk {min(left)}")
    return definition_text.text(root, xml)


def waiting(xml: str, sockets: Mapping[str, str]) -> frozenset[str]:
    """Return the disks of a running guest that still have a backing file at one of `sockets`.

    Raises ValueError if the XML is invalid.
    """
    found = set()
    for disk in domain_xml.tree(xml, "domain").findall("devices/disk"):
        target = disk.find("target")
        name = target.get("dev", "") if target is not None else ""
        for host in disk.findall("backingStore/source/host"):
            if name in sockets and host.get("socket") == sockets[name]:
                found.add(name)
    return frozenset(found)
