"""A guest's drives, and its definition with images at other paths."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from shlex import quote
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import Drive

# With what the source would else keep to itself, such as passwords of its consoles.
_WHOLE = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE


async def drives(hypervisor: Hypervisor, uuid: str) -> tuple[Drive, ...]:
    """The guest's drives as they are now."""
    return await hypervisor.ask(
        "reading the guest's drives",
        lambda connection: read_drives(connection.lookupByUUIDString(uuid).XMLDesc()),
    )


def read_drives(xml: str) -> tuple[Drive, ...]:
    """The drives of a domain XML."""
    return tuple(_drive(node) for node in parse.tree(xml, "domain").findall("devices/disk"))


def _drive(node: ET.Element) -> Drive:
    source, target, driver = node.find("source"), node.find("target"), node.find("driver")
    path = None
    if source is not None:
        path = source.get("file") or source.get("dev")
    return Drive(
        name=target.get("dev", "?") if target is not None else "?",
        kind=node.get("type", "file"),
        device=node.get("device", "disk"),
        path=path,
        # libvirt probes no formats and takes raw where none is written.
        format=driver.get("type", "raw") if driver is not None else "raw",
        read_only=node.find("readonly") is not None,
        shareable=node.find("shareable") is not None,
        encrypted=any(found is not None for found in (_in(node), _in(source))),
    )


def _in(node: ET.Element | None) -> ET.Element | None:
    return node.find("encryption") if node is not None else None


def with_images_at(xml: str, paths: Mapping[str, str]) -> str:
    """A domain XML in which these disks ("vda") have new images, at these paths; all else stays."""
    root = parse.tree(xml, "domain")
    changed = False
    for disk in root.findall("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        name = target.get("dev", "") if target is not None else ""
        if name in paths and source is not None and source.get("file") is not None:
            changed |= parse.another_image(source) or source.get("file") != paths[name]
            source.set("file", paths[name])
    return ET.tostring(root, encoding="unicode") if changed else xml


async def definitions_with_images_at(
    source: Hypervisor, uuid: str, paths: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """The running guest and its definition (None: it has none) for a target with these images;
    nothing at all if they are the same for that."""

    def read(connection: libvirt.virConnect) -> tuple[str | None, str | None]:
        domain = connection.lookupByUUIDString(uuid)
        whole = domain.XMLDesc(_WHOLE)
        if (running := with_images_at(whole, paths)) == whole:
            return None, None
        if not domain.isPersistent():
            return running, None
        stored = domain.XMLDesc(_WHOLE | libvirt.VIR_DOMAIN_XML_INACTIVE)
        return running, with_images_at(stored, paths)

    return await source.ask("reading the guest's definition", read)


async def folder_of(target: Hypervisor, wish: str) -> str:
    """A folder of the target, which the operator named by its path or as a libvirt pool.

    Raises BadInput if it is neither, or a pool that keeps no files.
    """
    if wish.startswith("/"):
        return str(PurePosixPath(wish))
    name = target.host.name

    def read(connection: libvirt.virConnect) -> tuple[str, str, bool]:
        pool = connection.storagePoolLookupByName(wish)
        root = parse.tree(pool.XMLDesc(), "pool")
        return root.get("type", ""), root.findtext("target/path", ""), bool(pool.isActive())

    try:
        kind, path, active = await target.ask(f"looking for storage pool {wish}", read)
    except HypervisorError as exc:
        if exc.code != libvirt.VIR_ERR_NO_STORAGE_POOL:
            raise
        raise BadInput(
            f"{name}: no storage pool {wish!r}",
            mend=f"run virsh pool-list --all on {name}, or give a folder",
        ) from exc
    if kind not in ("dir", "fs", "netfs"):
        raise BadInput(f"{name}: pool {wish!r} ({kind}) keeps no files", mend="give a folder")
    if not active:
        raise BadInput(
            f"{name}: pool {wish!r} is not active", mend=f"run virsh pool-start {quote(wish)}"
        )
    if not path.startswith("/"):
        raise HypervisorError(f"{name}: pool {wish!r} has its files at {path!r}", host=name)
    return path
