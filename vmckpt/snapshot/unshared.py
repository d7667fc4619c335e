"""What a guest has beside its captured disks, and how a fork is kept from writing into it. Pure.

A fork remembers files as they were when the snapshot was taken: whatever it writes into what the
original or others use now may ruin it.
"""

from collections.abc import Collection, Iterator
from xml.etree import ElementTree as ET

from vmckpt.capture import firmware
from vmckpt.errors import BadInput
from vmckpt.hypervisor import domain_xml

# QEMU has no read-only disk on these.
_NO_READ_ONLY = ("ide", "sata")
_OURS = ("file", "block", "network", "volume")


def beside(xml: str, captured: Collection[str]) -> tuple[str, ...]:
    """What is not in the snapshot and writable, each in a few words. Raises ValueError."""
    return tuple(what for _, what, _ in _beside(domain_xml.tree(xml, "domain"), captured))


def unshared(xml: str, captured: Collection[str], *, memory: bool) -> tuple[str, tuple[str, ...]]:
    """A fork's definition that writes into nothing it shares, and what there is to say of it.

    With its memory a machine must have all its devices: one that cannot be read-only is an error
    then, BadInput. Else it is left out. Raises ValueError.
    """
    root = domain_xml.tree(xml, "domain")
    holders = {node: parent for parent in root.iter() for node in parent}
    said = []
    for node, what, read_only in list(_beside(root, captured)):
        if read_only:
            for child in node.findall("shareable"):
                node.remove(child)
            ET.SubElement(node, "readonly")
            said.append(f"{what} is read-only for the fork")
        elif memory:
            raise BadInput(
                f"{what} is not in the snapshot, and a fork would write into it",
                mend="restore it in its own place, or fork a snapshot without memory",
            )
        else:
            holders[node].remove(node)
            said.append(f"{what} was left out of the fork")
    return ET.tostring(root, encoding="unicode"), tuple(said)


def drives(xml: str) -> dict[str, str]:
    """The files in CD and floppy drives, by drive: no guest starts without. Raises ValueError.

    Those that may be missing are left out: libvirt starts the guest with an empty drive then.
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
    """Each device, what it is, and whether it can be made read-only."""
    yield from _disks(root, captured)
    for node in root.findall("devices/filesystem"):
        if node.find("readonly") is None:
            driver, source = node.find("driver"), node.find("source")
            path = "?" if source is None else source.get("dir") or source.get("socket") or "?"
            able = driver is None or driver.get("type") != "virtiofs"
            yield node, f"the shared folder {path}", able
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
    """NVRAM and TPMs that are not among the snapshot's small files."""
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
        if node.find("readonly") is not None:
            continue
        bus = "" if target is None else target.get("bus", "")
        able = kind in _OURS and device != "lun" and bus not in _NO_READ_ONLY
        path = source.get("file") or source.get("dev") or source.get("name") or kind
        yield node, f"disk {name} ({path})", able
