"""What a restored guest is started as: itself, or a fork that cannot be mistaken for it. Pure."""

from collections.abc import Mapping
from uuid import NAMESPACE_OID, uuid5
from xml.etree import ElementTree as ET

from vmckpt.errors import BadInput
from vmckpt.hypervisor import domain_xml


def as_itself(xml: str, images: Mapping[str, str]) -> str:
    """The guest as it was, with its disks at other paths where these are given.

    Raises ValueError if that is no domain.
    """
    root = domain_xml.tree(xml, "domain")
    _place(root, images)
    return ET.tostring(root, encoding="unicode")


def as_fork(
    xml: str, images: Mapping[str, str], *, name: str, uuid: str, macs: list[str], link_up: bool
) -> str:
    """Another guest with the same inside: name, UUID and MACs are its own, and so is the id that
    tells the guest that it was restored. Its links are down unless `link_up`.

    `macs`: one for each card. Raises ValueError.
    """
    root = domain_xml.tree(xml, "domain")
    _place(root, images)
    _text(root, "name", name)
    _text(root, "uuid", uuid)
    for entry in root.findall("sysinfo/system/entry[@name='uuid']"):
        entry.text = uuid  # libvirt takes no other than the guest's
    if (genid := root.find("genid")) is not None:
        # Not an empty one: libvirt reads this twice, would make two, and find that they differ.
        genid.text = str(uuid5(NAMESPACE_OID, uuid))
    root.attrib.pop("id", None)
    cards = root.findall("devices/interface")
    if len(cards) != len(macs):
        raise ValueError(f"{len(cards)} network cards and {len(macs)} MACs")
    for card, mac in zip(cards, macs, strict=True):
        _card(card, mac, link_up=link_up)
    for console in root.findall("devices/*/source[@path]") + root.findall("devices/*/log[@file]"):
        _own_file(console, uuid)
    return ET.tostring(root, encoding="unicode")


def cards(xml: str) -> int:
    """How many network cards a guest has."""
    return len(domain_xml.tree(xml, "domain").findall("devices/interface"))


def image_of(xml: str, disk: str) -> str:
    """Where a disk's image was. Raises ValueError if it has none, BadInput if what it has is not
    an image that can be made anew: then nothing of it may be written."""
    for node in domain_xml.tree(xml, "domain").findall("devices/disk"):
        target, source = node.find("target"), node.find("source")
        if target is not None and source is not None and target.get("dev") == disk:
            why = _no_image(node, source)
            if why is not None:
                raise BadInput(
                    f"disk {disk} {why}: it cannot be restored by this vmckpt",
                    mend="look into it with vmckpt snapshot open, and copy it from there by hand",
                )
            if path := source.get("file"):
                return path
    raise ValueError(f"disk {disk} has no image")


def _no_image(disk: ET.Element, source: ET.Element) -> str | None:
    kind = disk.get("type", "file")
    if kind != "file":
        return f"is of the kind {kind} ({source.get('dev') or source.get('name') or 'no path'})"
    if disk.find("encryption") is not None or source.find("encryption") is not None:
        return "is encrypted by QEMU"
    if source.find("dataStore") is not None:
        return "has its data in a file of its own"
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
        card.remove(target)  # the host's name for it is the other guest's
    if not link_up:
        link = card.find("link")
        link = ET.SubElement(card, "link") if link is None else link
        link.set("state", "down")


def _own_file(node: ET.Element, uuid: str) -> None:
    """A file or socket of a console cannot be shared."""
    for key in ("path", "file"):
        if (path := node.get(key)) is not None and not path.startswith("/dev/"):
            node.set(key, f"{path}.{uuid[:8]}")


def _text(root: ET.Element, tag: str, text: str) -> None:
    node = root.find(tag)
    if node is None:
        raise ValueError(f"the guest has no {tag}")
    node.text = text
