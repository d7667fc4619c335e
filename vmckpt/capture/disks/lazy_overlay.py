"""A guest that is started on images which are still empty: its description. Pure."""

from collections.abc import Mapping
from xml.etree import ElementTree as ET

from vmckpt.errors import BadInput
from vmckpt.hypervisor import domain_xml


def require_overlay_support(formats: Mapping[str, str]) -> None:
    """Raises BadInput if one of the disks (name, format) cannot come in behind."""
    raw = sorted(name for name, format_ in formats.items() if format_ != "qcow2")
    if raw:
        raise BadInput(
            f"disk {raw[0]} is {formats[raw[0]]}: only a qcow2 image can fill up while it is used",
            hint="leave --lazy out",
        )


def behind(xml: str, sockets: Mapping[str, str]) -> str:
    """The guest with images whose content is behind NBD sockets (by disk) until it was pulled in.

    Where that server is gone the guest stands still, and no error reaches it. Raises ValueError.
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
        raise ValueError(f"no disk {min(left)}")
    return ET.tostring(root, encoding="unicode")


def waiting(xml: str, sockets: Mapping[str, str]) -> frozenset[str]:
    """Which of these disks of a running guest still have their content behind such a socket."""
    found = set()
    for disk in domain_xml.tree(xml, "domain").findall("devices/disk"):
        target = disk.find("target")
        name = target.get("dev", "") if target is not None else ""
        for host in disk.findall("backingStore/source/host"):
            if name in sockets and host.get("socket") == sockets[name]:
                found.add(name)
    return frozenset(found)
