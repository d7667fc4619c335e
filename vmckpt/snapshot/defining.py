"""Which definition is stored of a guest that came back in its old place. Pure.

A definition that describes the hardware of the snapshot stays as it is, with all that only a stored
one has. One that is missing, or describes another machine, makes way for the snapshot's: at its
next start the guest must find the disks and devices that it has now.
"""

from collections.abc import Iterator
from xml.etree import ElementTree as ET

from vmckpt.hypervisor import domain_xml
from vmckpt.model.guest import Guest

_SOURCES = ("file", "dev", "name", "volume", "dir", "network", "bridge")


def wanted(stored: str | None, came_back: str) -> str | None:
    """What to store instead; None: nothing. Raises ValueError if one of them is no domain."""
    if stored is None:
        return came_back
    return came_back if differs(stored, came_back) else None


def differs(stored: str, came_back: str) -> tuple[str, ...]:
    """In which parts two definitions describe different hardware; empty if they do not."""
    first, second = (dict(_hardware(domain_xml.tree(one, "domain"))) for one in (stored, came_back))
    known = sorted(first.keys() | second.keys())
    return tuple(key for key in known if first.get(key) != second.get(key))


def _hardware(root: ET.Element) -> Iterator[tuple[str, str]]:
    """Parts and what they are; what libvirt fills in by itself is left out."""
    guest = guest_of(ET.tostring(root, encoding="unicode"))
    yield "machine", f"{guest.accelerator} {guest.arch} {guest.machine}"
    yield "memory", str(guest.memory)
    yield "processors", str(guest.vcpus)
    yield "firmware", " ".join(guest.boot_files)
    for disk in root.findall("devices/disk"):
        name = _of(disk, "target", "dev")
        driver = _of(disk, "driver", "type")
        yield f"disk {name}", f"{driver} {_source(disk)} {_of(disk, 'target', 'bus')}"
    for number, card in enumerate(root.findall("devices/interface")):
        what = f"{_of(card, 'mac', 'address')} {_of(card, 'model', 'type')} {_source(card)}"
        yield f"network card {number}", what
    for kind in ("hostdev", "tpm", "filesystem", "watchdog", "rng", "shmem", "vsock"):
        found = root.findall(f"devices/{kind}")
        if found:
            yield kind, " ".join(one.get("model") or one.get("type") or "" for one in found)


def guest_of(xml: str) -> Guest:
    """A guest that is off, by its definition. Raises ValueError."""
    return domain_xml.guest(xml, state=5, persistent=True, autostart=False, snapshots=0, job=None)


def _of(node: ET.Element, child: str, key: str) -> str:
    found = node.find(child)
    return "" if found is None else found.get(key, "")


def _source(node: ET.Element) -> str:
    source = node.find("source")
    if source is None:
        return ""
    return next((value for key in _SOURCES if (value := source.get(key))), "")
