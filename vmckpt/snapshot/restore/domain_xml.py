"""The domain XML of a restored guest, original or fork, and its stored definition. Pure.

A fork must not be mistaken for the original. It also must not write to files other than its
captured disks: its memory matches the old content of those files, so its writes would damage data
that other guests use.

A stored definition that describes the same hardware as the snapshot is kept, including everything
that only a stored definition has. If the stored definition is missing or describes different
hardware, the snapshot's definition replaces it. The guest must find the same disks and devices at
its next start.
"""

from collections.abc import Collection, Iterator, Mapping
from uuid import NAMESPACE_OID, uuid5
from xml.etree import ElementTree as ET

from vmckpt.capture import firmware
from vmckpt.definition import own_resources
from vmckpt.errors import BadInput
from vmckpt.hypervisor import definition_text, domain_xml, hardware
from vmckpt.model.guest import Guest


def xml_for_replace(xml: str, images: Mapping[str, str]) -> str:
    """Return the definition of the original guest, with disks at other paths if given.

    `images` are paths by disk target. Raises ValueError if the definition is invalid.
    """
    root = domain_xml.tree(xml, "domain")
    _place(root, images)
    return definition_text.text(root, xml)


def xml_for_fork(
    xml: str, images: Mapping[str, str], *, name: str, uuid: str, macs: list[str], link_up: bool
) -> str:
    """Return the definition of a fork, with its own name, UUID, MAC addresses and generation ID.

    The generation ID (genid) lets the guest detect that it was restored. The fork's links are down
    unless `link_up` is set. `images` are paths by disk target, `macs` has an address for each card.
    Raises ValueError if the definition is invalid or does not match `macs`.
    """
    root = domain_xml.tree(xml, "domain")
    _place(root, images)
    _text(root, "name", name)
    _text(root, "uuid", uuid)
    for entry in root.findall("sysinfo/system/entry[@name='uuid']"):
        entry.text = uuid  # libvirt accepts only the guest's own UUID here
    if (genid := root.find("genid")) is not None:
        # An empty element does not work: libvirt parses the XML twice, generates two different IDs
        # and reports that they differ.
        genid.text = str(uuid5(NAMESPACE_OID, uuid))
    root.attrib.pop("id", None)
    cards = root.findall("devices/interface")
    if len(cards) != len(macs):
        raise ValueError(f"{len(cards)} network cards, but {len(macs)} MAC addresses")
    for card, mac in zip(cards, macs, strict=True):
        _card(card, mac, link_up=link_up)
    return definition_text.text(root, xml)


def with_links_up(xml: str) -> str:
    """Return a definition in which the links of all network cards are up. Raises ValueError."""
    root = domain_xml.tree(xml, "domain")
    for link in root.findall("devices/interface/link[@state='down']"):
        link.set("state", "up")
    return definition_text.text(root, xml)


def cards(xml: str) -> int:
    """Return the number of network cards of a guest. Raises ValueError if the XML is invalid."""
    return len(domain_xml.tree(xml, "domain").findall("devices/interface"))


def macs(xml: str) -> frozenset[str]:
    """Return the MAC addresses of a guest's network cards. Raises ValueError."""
    found = domain_xml.tree(xml, "domain").findall("devices/interface/mac[@address]")
    return frozenset(one.get("address", "") for one in found)


def bases(xml: str) -> dict[str, tuple[str, str]]:
    """Return path and format of the base image of each disk that has one. Raises ValueError."""
    found = {}
    for disk in domain_xml.tree(xml, "domain").findall("devices/disk"):
        target, base = disk.find("target"), domain_xml.base(disk)
        if target is not None and base is not None:
            found[target.get("dev", "")] = base
    return found


def image_of(xml: str, disk: str) -> str:
    """Return the path of a disk's image.

    Raises ValueError if the disk has no image. Raises BadInput if vmckpt cannot create an image of
    this kind, so that the image is not overwritten.
    """
    for node in domain_xml.tree(xml, "domain").findall("devices/disk"):
        target, source = node.find("target"), node.find("source")
        if target is not None and source is not None and target.get("dev") == disk:
            why = _no_image(node, source)
            if why is not None:
                raise BadInput(
                    f"disk {disk} {why}, which vmckpt cannot restore",
                    hint="open the snapshot with vmckpt snapshot open SNAPSHOT, and copy the data"
                    " manually",
                )
            if path := source.get("file"):
                return path
    raise ValueError(f"disk {disk} has no image")


def _no_image(disk: ET.Element, source: ET.Element) -> str | None:
    kind = disk.get("type", "file")
    if kind != "file":
        return f"is of type {kind} ({source.get('dev') or source.get('name') or 'no path'})"
    if disk.find("encryption") is not None or source.find("encryption") is not None:
        return "is encrypted by QEMU"
    if source.find("dataStore") is not None:
        return "has an external data file"
    if source.find("slices") is not None:
        return "is a slice of a file"
    return None


def _place(root: ET.Element, images: Mapping[str, str]) -> None:
    for disk in root.findall("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        name = target.get("dev", "") if target is not None else ""
        if name in images and source is not None:
            if (why := _no_image(disk, source)) is not None:
                raise ValueError(f"disk {name} {why}")
            source.attrib.clear()
            domain_xml.another_image(source)
            source.set("file", images[name])
            for node in disk.findall("backingStore"):
                disk.remove(node)


def _card(card: ET.Element, mac: str, *, link_up: bool) -> None:
    node = card.find("mac")
    if node is None:
        node = ET.SubElement(card, "mac")
    node.set("address", mac)
    if (target := card.find("target")) is not None:
        card.remove(target)  # the original guest uses this host interface
    if not link_up:
        link = card.find("link")
        link = ET.SubElement(card, "link") if link is None else link
        link.set("state", "down")


def _text(root: ET.Element, tag: str, text: str) -> None:
    node = root.find(tag)
    if node is None:
        raise ValueError(f"the guest has no {tag}")
    node.text = text


# Buses on which QEMU does not support read-only disks.
_NO_READ_ONLY = ("ide", "sata")
_OURS = ("file", "block", "network", "volume")
_EXCLUSIVE = ("nvme", "vhostuser", "vhostvdpa")
"""Types of disks that only one guest can use, even for reading."""


def beside(xml: str, captured: Collection[str]) -> tuple[str, ...]:
    """Describe each writable device that is not in the snapshot. Raises ValueError.

    `captured` are the targets of the disks in the snapshot.
    """
    return tuple(what for _, what, _ in _beside(domain_xml.tree(xml, "domain"), captured))


def unshared(xml: str, captured: Collection[str], *, memory: bool) -> tuple[str, tuple[str, ...]]:
    """Let a fork run beside its original. `xml`: the fork's definition, with its own UUID.

    Consoles, screens and the like get host resources of their own. Shared writable devices become
    read-only. A device that cannot be read-only is removed, unless the fork has `memory`: a running
    machine needs all its devices, so BadInput is raised. Returns the definition and warnings.
    Raises ValueError if the definition is invalid.
    """
    root = domain_xml.tree(xml, "domain")
    lacks = own_resources.isolate(root, root.findtext("uuid", "")[:8])
    holders = {node: parent for parent in root.iter() for node in parent}
    said = []
    for node, what, read_only in list(_beside(root, captured)):
        if read_only:
            if node.tag == "disk":
                _permit_writer(node)
            ET.SubElement(node, "readonly")
            said.append(f"{what} is read-only for the fork")
        elif memory:
            raise BadInput(
                f"{what} is not in the snapshot, and a fork would write to it",
                hint="restore the original guest, or fork a snapshot without memory",
            )
        else:
            holders[node].remove(node)
            said.append(f"{what} was removed from the fork")
    said += [f"in the fork, {one}" for one in lacks]
    return definition_text.text(root, xml), tuple(said)


def _permit_writer(disk: ET.Element) -> None:
    """Let QEMU open a disk beside the original, which has a lock for writing on it.

    libvirt permits this for raw images only.
    """
    for child in disk.findall("shareable"):
        disk.remove(child)
    driver = disk.find("driver")
    if driver is None or driver.get("type", "raw") == "raw":
        ET.SubElement(disk, "shareable")


def drives(xml: str) -> dict[str, str]:
    """Return the files in CD and floppy drives, by drive; the guest cannot start without them.

    Files with a startup policy are left out, as libvirt can start the guest with an empty drive.
    Raises ValueError.
    """
    found = {}
    for node in domain_xml.tree(xml, "domain").findall("devices/disk"):
        target, source = node.find("target"), node.find("source")
        path = None if source is None else source.get("file")
        if target is None or source is None or path is None or source.get("startupPolicy"):
            continue
        if node.get("device") in ("cdrom", "floppy"):
            found[target.get("dev", "?")] = path
    return found


def _beside(root: ET.Element, captured: Collection[str]) -> Iterator[tuple[ET.Element, str, bool]]:
    """Yield each writable device that is not captured, its description, and whether it can be made
    read-only.
    """
    yield from _disks(root, captured)
    for node in root.findall("devices/filesystem"):
        if node.find("readonly") is None:
            driver, source = node.find("driver"), node.find("source")
            path = "?" if source is None else source.get("dir") or source.get("socket") or "?"
            able = driver is None or driver.get("type") != "virtiofs"
            yield node, f"the shared directory {path}", able
        elif (source := node.find("source")) is not None and source.get("socket"):
            yield node, f"the shared directory {source.get('socket')}", False
    for node, what in own_resources.exclusive(root):
        yield node, what, False
    for node in root.findall("devices/hostdev"):
        yield node, f"the host's {node.get('type', '')} device", False
    for node in root.findall("devices/shmem"):
        yield node, f"the shared memory {node.get('name', '?')}", False
    for node in root.findall("devices/memory"):
        path = node.findtext("source/path", "")
        if path:
            yield node, f"the memory in {path}", False
    yield from _states(root)


def _states(root: ET.Element) -> Iterator[tuple[ET.Element, str, bool]]:
    """Yield NVRAM and TPMs whose state is not among the snapshot's small files."""
    nvram = root.find("os/nvram")
    if nvram is not None and nvram.get("type", "file") != "file":
        yield nvram, f"the NVRAM on a {nvram.get('type')} disk", False
    for node in root.findall("devices/tpm"):
        if node.find("backend[@type='emulator']") is None:
            yield node, "the host's TPM", False
        elif path := firmware.tpm_elsewhere(node):
            yield node, f"the TPM's state in {path}", False


def _disks(root: ET.Element, captured: Collection[str]) -> Iterator[tuple[ET.Element, str, bool]]:
    for node in root.findall("devices/disk"):
        target, source = node.find("target"), node.find("source")
        name = "?" if target is None else target.get("dev", "?")
        kind, device = node.get("type", "file"), node.get("device", "disk")
        if name in captured or source is None or device == "cdrom":
            continue
        if node.find("readonly") is not None and kind not in _EXCLUSIVE:
            continue
        bus = "" if target is None else target.get("bus", "")
        able = kind in _OURS and device != "lun" and bus not in _NO_READ_ONLY
        path = source.get("file") or source.get("dev") or source.get("name") or kind
        yield node, f"disk {name} ({path})", able


def wanted(stored: str | None, came_back: str) -> str | None:
    """Return the definition to store for a restored guest; None: keep the stored definition.

    `stored`: the host's definition; None: the host has none. `came_back`: the definition in the
    snapshot, as adapted for the restore. Raises ValueError if one of the definitions is invalid.
    """
    if stored is None:
        return came_back
    return came_back if hardware.differs(stored, came_back) else None


def guest_of(xml: str) -> Guest:
    """Build a Guest, with state shut off, from its domain XML. Raises ValueError."""
    return domain_xml.guest(xml, state=5, persistent=True, autostart=False, snapshots=0, job=None)
