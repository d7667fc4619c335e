"""The libvirt XML of the copy that a failover test runs. Pure.

The copy is the same machine under a different name, without a connection to any network.
"""

from collections.abc import Mapping
from uuid import NAMESPACE_OID, uuid5
from xml.etree import ElementTree as ET

from vmckpt.capture.disks import lazy_overlay
from vmckpt.definition import own_resources
from vmckpt.hypervisor import definition_text, domain_xml
from vmckpt.replication.backup import standby_xml

MARK = domain_xml.TEST


def copy(
    xml: str,
    *,
    name: str,
    uuid: str,
    session: str,
    disks: Mapping[str, tuple[str, str]],
    nvram: str | None = None,
) -> str:
    """Return the XML of the copy, which gets `name` and `uuid`. `xml`: the standby's XML.

    `disks`: for each replicated disk, by name, an image for the copy, and the socket that serves
    the disk's content under this name. `session`: ID of the protection's session, for the mark
    in the metadata. `nvram`: the copy's NVRAM file, which replaces the standby's. Raises ValueError
    if `xml` is not a domain, or lacks an element to be replaced.
    """
    root = standby_xml.plain(xml)
    of = root.findtext("name", "")
    standby_xml.place(root, {target: image for target, (image, _) in disks.items()})
    _text(root, "name", name)
    _text(root, "uuid", uuid)
    if (genid := root.find("genid")) is not None:
        # A new ID shows the guest that it is a copy. The ID must not be empty: libvirt parses the
        # XML twice, and would generate two different IDs.
        genid.text = str(uuid5(NAMESPACE_OID, uuid))
    if nvram is not None:
        _text(root, "os/nvram", nvram)
    own_resources.isolate(root, None)
    for card in root.findall("devices/interface"):
        own_resources.unplug(card)
    _mark(root, session, of)
    standby_xml.wait(root)
    text = definition_text.text(root, xml)
    return lazy_overlay.behind(text, {target: socket for target, (_, socket) in disks.items()})


def firmware(xml: str) -> str | None:
    """Return the path of the guest's NVRAM file; None: the XML names no such file.

    Raises ValueError if `xml` is not a domain.
    """
    return domain_xml.tree(xml, "domain").findtext("os/nvram", "").strip() or None


def _mark(root: ET.Element, session: str, of: str) -> None:
    """Replace the guest's metadata, which policies and schedules use, with the mark of a test."""
    for old in root.findall("metadata"):
        root.remove(old)
    mark = ET.SubElement(ET.SubElement(root, "metadata"), f"{{{MARK}}}test")
    mark.set("session", session)
    mark.set("of", of)
    ET.register_namespace("vmckpt-test", MARK)


def _text(root: ET.Element, tag: str, text: str) -> None:
    node = root.find(tag)
    if node is None:
        raise ValueError(f"the guest has no {tag}")
    node.text = text
