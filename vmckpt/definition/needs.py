"""Find the resources of the host that a definition names. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from xml.etree import ElementTree as ET

from vmckpt.definition.host_resources import ROWS, WAITING, Kind, Row
from vmckpt.model.finding import Severity
from vmckpt.units import MEMORY_UNITS

_BY_LIBVIRT = (
    "/var/lib/libvirt/qemu/", "/run/libvirt/", "/var/run/libvirt/", "/var/log/libvirt/",
    "/dev/pts/",
)  # fmt: skip
"""Directories in which libvirt creates files itself, on every host."""
_EVERYWHERE = ("", "0.0.0.0", "::", "localhost", "127.0.0.1", "::1")
"""Addresses that every host has."""
_PRESENT_EVERYWHERE = ("/dev/random", "/dev/urandom", "/dev/null")
_ELSEWHERE = (Kind.DISK, Kind.CARD)
"""Kinds with checks of their own in preflight."""
_MOST_CPUS = 1 << 16
OPTIONAL = ("optional", "requisite")
"""Values of startupPolicy for which libvirt drops a missing medium or device in a migration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A resource of the host that a guest needs."""

    kind: Kind
    name: str
    """Path, name, UUID, address or number. A volume: "pool/volume"; huge pages: their size in
    KiB, "" for the default size."""
    device: str | None = None
    """The guest's device that needs the resource, such as "disk vda"; None: the guest itself."""
    severity: Severity = Severity.BLOCKER
    unless: str | None = None
    """Path of a file; if it exists on the target, the resource is not needed."""


class Answer(StrEnum):
    """A host's answer about one resource. A missing answer means unknown."""

    PRESENT = "present"
    ABSENT = "absent"
    INACTIVE = "inactive"
    """A network or storage pool that is defined, but not started."""
    NO_VALUE = "no value"
    """A secret that is defined, but has no value."""


Answers = Mapping[Resource, Answer]
"""The answers of the target, without the resources about which nothing is known."""


def needs(root: ET.Element) -> tuple[Resource, ...]:
    """Return the resources that a domain XML names, each once, with the first device that needs it.

    Left out are files that libvirt creates itself, resources that every host has, devices that
    libvirt may drop in a migration (startupPolicy), and disk images and network cards, which
    preflight compares itself. Raises ValueError.
    """
    found: dict[tuple[Kind, str], Resource] = {}
    for row in ROWS:
        if row.kind in _ELSEWHERE:
            continue
        for device, node in _matches(root, row):
            for one in _resources(row, node, device):
                if one.kind is Kind.UNCHECKED and one.name in WAITING:
                    continue  # no resource, and a migration does not need it
                # libvirt describes the first serial port a second time, as a console.
                found.setdefault((one.kind, one.name), one)
    return tuple(found.values())


def _matches(root: ET.Element, row: Row) -> Iterator[tuple[str | None, ET.Element]]:
    """Yield the elements of a row, each with the name of its device, or None."""
    steps = row.path.split("/")
    if steps[0] != "devices" or steps[1] == "emulator":
        for node in root.findall(row.path):
            yield None, node
        return
    for device in root.findall("/".join(steps[:2])):
        source = device.find("source")
        if source is not None and source.get("startupPolicy") in OPTIONAL:
            continue
        for node in device.findall("/".join(steps[2:]) or "."):
            yield _named(root, device), node


def _named(root: ET.Element, device: ET.Element) -> str:
    """Name a device for messages: "disk vda", "serial 2", "network card 52:54:00:12:34:56"."""
    target, mac = device.find("target"), device.find("mac")
    if device.tag == "disk" and target is not None:
        return f"disk {target.get('dev', '?')}"
    if device.tag == "interface" and mac is not None:
        return f"network card {mac.get('address', '?')}"
    alike = root.findall(f"devices/{device.tag}")
    return device.tag if len(alike) == 1 else f"{device.tag} {alike.index(device) + 1}"


def _resources(row: Row, node: ET.Element, device: str | None) -> Iterator[Resource]:
    value = node.get(row.value[1:], "") if row.value else (node.text or "").strip()
    for name in _names(row.kind, value, node):
        yield Resource(
            kind=row.kind, name=name, device=device, severity=row.severity,
            unless=(node.text or "").strip() or None if row.value == "@template" else None,
        )  # fmt: skip


def _names(kind: Kind, value: str, node: ET.Element) -> Iterator[str]:
    """Yield the names of the resources that `value`, found in `node`, names.

    Yields nothing if every host has them.
    """
    special = _SPECIAL.get(kind)
    if special is not None:
        yield from special(value, node)
    elif value:
        yield value


def _path(path: str, _node: ET.Element) -> Iterator[str]:
    if path.startswith("/") and not _usual(path):
        yield path


def _directory(path: str, _node: ET.Element) -> Iterator[str]:
    if path.startswith("/") and not _usual(path):
        yield str(PurePosixPath(path).parent)


def _address(address: str, _node: ET.Element) -> Iterator[str]:
    if address not in _EVERYWHERE:
        yield address


def _port(port: str, _node: ET.Element) -> Iterator[str]:
    if port.isdecimal() and 0 < int(port) < 1 << 16:
        yield port


def _numbers(text: str, _node: ET.Element) -> Iterator[str]:
    yield from map(str, sorted(cpuset(text)))


def _volume(name: str, node: ET.Element) -> Iterator[str]:
    if name:
        yield f"{node.get('pool', '')}/{name}"


def _usual(path: str) -> bool:
    return path.startswith(_BY_LIBVIRT) or path in _PRESENT_EVERYWHERE


def cpuset(text: str) -> frozenset[int]:
    """Return the numbers in a set as libvirt writes it: "0-3,^2,7". Empty if `text` is invalid."""
    found: set[int] = set()
    for part in text.replace(" ", "").split(","):
        low, dash, high = part.removeprefix("^").partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or int(high or low) > _MOST_CPUS:
            return frozenset()
        numbers = range(int(low), int(high or low) + 1)
        if part.startswith("^"):
            found.difference_update(numbers)
        else:
            found.update(numbers)
    return frozenset(found)


def _page_sizes(_text: str, node: ET.Element) -> Iterator[str]:
    """Yield the sizes of the huge pages in KiB; "" for the default size of the host."""
    pages = node.findall("page")
    if not pages:
        yield ""
    for page in pages:
        size, unit = page.get("size", ""), MEMORY_UNITS.get(page.get("unit", "KiB").lower())
        if size.isdecimal() and unit is not None:
            yield str(int(size) * unit // 1024)


def _pci(_text: str, node: ET.Element) -> Iterator[str]:
    """Yield the address of a passed-through PCI device: "0000:03:00.0"."""
    address = node.find("address")
    if address is not None and address.get("bus") is not None:
        domain, bus, slot, function = (
            _hex(address.get(key)) for key in ("domain", "bus", "slot", "function")
        )
        yield f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"


def _usb(_text: str, node: ET.Element) -> Iterator[str]:
    """Yield vendor and product of a passed-through USB device: "1234:5678"."""
    vendor, product = node.find("vendor"), node.find("product")
    if vendor is not None and product is not None:
        yield f"{_hex(vendor.get('id')):04x}:{_hex(product.get('id')):04x}"


def _hex(text: str | None) -> int:
    """Return a number as libvirt writes it, such as "0x1a". Raises ValueError."""
    return int(text or "0", 0)


_SPECIAL: Mapping[Kind, Callable[[str, ET.Element], Iterator[str]]] = {
    Kind.FILE: _path, Kind.DEVICE: _path, Kind.SOCKET: _path, Kind.DIRECTORY: _directory,
    Kind.ADDRESS: _address, Kind.PORT: _port, Kind.CPU: _numbers, Kind.NUMA_NODE: _numbers,
    Kind.HUGE_PAGES: _page_sizes, Kind.VOLUME: _volume, Kind.PCI_DEVICE: _pci,
    Kind.USB_DEVICE: _usb,
}  # fmt: skip
"""By kind: a function that yields the names, from an element's value and the element. For a kind
without a function, the value is the name."""
