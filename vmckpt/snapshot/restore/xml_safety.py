"""Find resources of the host that a snapshot's definition must not use. Pure.

Elements that are known to be harmless (see `harmless_elements`) are allowed, and so is everything
that the guest already uses on that host.

Disks and definition come from the host that took the snapshot. The signature identifies the
snapshot, but does not prove that the host was honest. Without this check, an attacker in control of
that host could write any file on another host as root, or run a program there.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree import ElementTree as ET

from vmckpt.hypervisor import domain_xml
from vmckpt.snapshot.restore import harmless_elements
from vmckpt.store.format.metadata import DiskMake

_FOLDERS = (
    "/var/lib/libvirt/images", "/var/lib/libvirt/qemu/nvram", "/var/lib/libvirt/swtpm",
    "/var/lib/libvirt/qemu/channel", "/run/libvirt/qemu/channel", "/var/log/libvirt",
)  # fmt: skip
"""libvirt's own directories, which contain no executables."""
_FORMATS = ("raw", "qcow2", "qed", "vmdk", "vdi", "vpc", "vhdx")
_TARGET = re.compile("[a-z][a-z0-9]{0,15}")
_EMULATOR = re.compile(r"/usr/(local/)?(bin|libexec|lib/[\w.-]+)/(qemu-system-\w+|qemu-kvm|kvm)")
_FILES = ("file", "pipe", "dev", "unix")
"""Types of consoles for which libvirt creates, opens or removes a file on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The resources of the host that a guest may use."""

    host: str
    definition: str | None
    """The guest's definition as stored on the host; everything in it is allowed. None if the host
    has no definition of the guest."""
    storage: Sequence[str]
    """Storage directories of the inventory, and the directory that the operator chose for this
    restore."""
    paths: frozenset[str] = field(init=False)
    uses: frozenset[str] = field(init=False)
    has: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        root = None if self.definition is None else domain_xml.tree(self.definition, "domain")
        paths, uses, has = set[str](), set[str](), set[str]()
        if root is not None:
            paths = {path for _, path in (*_files(root), *harmless_elements.paths(root))}
            uses = {use for _, use in _uses(root)}
            has = {harmless_elements.written(node) for node in root.iter()}
        object.__setattr__(self, "paths", frozenset(paths))
        object.__setattr__(self, "uses", frozenset(uses))
        object.__setattr__(self, "has", frozenset(has))

    def holds(self, path: str) -> bool:
        """Return whether the guest may use a file at `path`.

        It may use files in a storage directory or in one of libvirt's directories. It may also use
        files in the same directory as a file that the guest already has on the host.
        """
        if path in self.paths:
            return True
        beside = {posixpath.dirname(one) for one in self.paths if not one.startswith("/dev/")}
        folders = {*_FOLDERS, *(posixpath.normpath(one) for one in self.storage), *beside} - {"/"}
        plain = path.startswith("/") and posixpath.normpath(path) == path
        return plain and any(path.startswith(f"{one}/") for one in folders)


def unsafe_references(
    xml: str, images: Mapping[str, str], disks: Sequence[DiskMake], here: Here
) -> tuple[str, ...]:
    """Return every reason not to start a guest or write its images on the host.

    `images` are the paths of the images. Raises ValueError if the definition is invalid.
    """
    root = domain_xml.tree(xml, "domain")
    found = []
    for disk in disks:
        if not _TARGET.fullmatch(disk.target):
            found.append(f"disk target {disk.target!r} is invalid")
        if disk.format not in _FORMATS:
            found.append(f"disk {disk.target} has the unsupported format {disk.format!r}")
    reached = {path: f"{name} would be written" for name, path in images.items()}
    for what, path in _files(root):
        reached.setdefault(path, f"{what} would be used")
    for where, path in harmless_elements.paths(root):
        reached.setdefault(path, f"<{where}> would be read")
    found += [
        f"{what} at {path!r}, outside the storage directories of {here.host}"
        for path, what in reached.items()
        if not here.holds(path)
    ]
    found += [what for what, use in _uses(root) if use not in here.uses]
    return (*found, *harmless_elements.unknown(root, but=here.has))


def _files(root: ET.Element) -> Iterator[tuple[str, str]]:
    """Yield the host's files that a guest writes, or that are created or removed for the guest.

    Yields a description and a path for each file.
    """
    for what, node, keys in (*_shared(root), *_consoles(root)):
        source = node.find("source")
        for key in keys:
            if source is not None and (path := source.get(key)):
                yield what, path
    for log in root.findall("devices/*/log[@file]"):
        yield "a log", log.get("file", "")
    for node in root.findall("devices/memory/source/path"):
        yield "memory", node.text or ""
    if (path := root.findtext("os/nvram", "").strip()) != "":
        yield "NVRAM", path
    for node in root.findall("os/nvram/source[@file]"):
        yield "NVRAM", node.get("file", "")


def _shared(root: ET.Element) -> Iterator[tuple[str, ET.Element, Sequence[str]]]:
    for node in root.findall("devices/disk"):
        if node.find("readonly") is None and node.get("device") != "cdrom":
            target = node.find("target")
            name = "?" if target is None else target.get("dev", "?")
            yield f"disk {name}", node, ("file", "dev", "dir")
    for node in root.findall("devices/filesystem"):
        if node.find("readonly") is None:
            yield "a shared directory", node, ("dir", "file", "socket")


def _consoles(root: ET.Element) -> Iterator[tuple[str, ET.Element, Sequence[str]]]:
    for node in root.findall("devices/*[@type]/source[@path]/.."):
        if node.get("type") in _FILES:
            yield f"a {node.tag}", node, ("path",)


def _uses(root: ET.Element) -> Iterator[tuple[str, str]]:
    """Yield elements that run an executable or use a device of the host.

    Yields a reason and comparable text for each element. Emulators at their usual paths are
    omitted, as every guest needs an emulator.
    """
    for node in root:
        if node.tag.startswith("{"):
            name = node.tag.rpartition("}")[2]
            why = f"the definition uses the QEMU-specific element {name}"
            yield why, harmless_elements.written(node)
    for node in root.findall("seclabel"):
        if node.get("type", "dynamic") in ("static", "none"):
            yield (
                f"the definition sets its own security label ({node.get('model', '')})",
                harmless_elements.written(node),
            )
    for node in root.findall("devices/emulator"):
        program = (node.text or "").strip()
        if not _EMULATOR.fullmatch(program):
            yield f"the emulator is {program!r}", harmless_elements.written(node)
    for tag in ("script", "downscript"):
        for node in root.findall(f"devices/interface/{tag}"):
            yield (
                f"a network card runs {node.get('path', '')!r}", harmless_elements.written(node)
            )  # fmt: skip
    for node in root.findall("devices/hostdev"):
        source = node.find("source")
        told = "" if source is None else harmless_elements.written(source)
        yield f"the guest uses a {node.get('type', '')} device of the host", told
