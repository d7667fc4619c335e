"""A guest's drives and image paths, and which guests of a host use which image files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from shlex import quote
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import Drive
from vmckpt.units import Seconds

# With what the source would else keep to itself, such as passwords of its consoles.
_WHOLE = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE


async def drives(hypervisor: Hypervisor, uuid: str) -> tuple[Drive, ...]:
    """The guest's drives as they are now."""
    return await hypervisor.query(
        "reading the guest's drives",
        lambda connection: read_drives(connection.lookupByUUIDString(uuid).XMLDesc()),
    )


def read_drives(xml: str) -> tuple[Drive, ...]:
    """The drives of a domain XML."""
    return tuple(_drive(node) for node in domain_xml.tree(xml, "domain").findall("devices/disk"))


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
    root = domain_xml.tree(xml, "domain")
    changed = False
    for disk in root.findall("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        name = target.get("dev", "") if target is not None else ""
        if name in paths and source is not None and source.get("file") is not None:
            changed |= domain_xml.another_image(source) or source.get("file") != paths[name]
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

    return await source.query("reading the guest's definition", read)


async def folder_of(target: Hypervisor, wish: str) -> str:
    """A folder of the target, which the operator named by its path or as a libvirt pool.

    Raises BadInput if it is neither, or a pool that keeps no files.
    """
    if wish.startswith("/"):
        return str(PurePosixPath(wish))
    name = target.host.name

    def read(connection: libvirt.virConnect) -> tuple[str, str, bool]:
        pool = connection.storagePoolLookupByName(wish)
        root = domain_xml.tree(pool.XMLDesc(), "pool")
        return root.get("type", ""), root.findtext("target/path", ""), bool(pool.isActive())

    try:
        kind, path, active = await target.query(f"looking for storage pool {wish}", read)
    except HypervisorError as exc:
        if exc.code != libvirt.VIR_ERR_NO_STORAGE_POOL:
            raise
        raise BadInput(
            f"{name}: no storage pool {wish!r}",
            hint=f"run virsh pool-list --all on {name}, or give a folder",
        ) from exc
    if kind not in ("dir", "fs", "netfs"):
        raise BadInput(f"{name}: pool {wish!r} ({kind}) keeps no files", hint="give a folder")
    if not active:
        raise BadInput(
            f"{name}: pool {wish!r} is not active", hint=f"run virsh pool-start {quote(wish)}"
        )
    if not path.startswith("/"):
        raise HypervisorError(f"{name}: pool {wish!r} has its files at {path!r}", host=name)
    return path


@dataclass(frozen=True, slots=True)
class User:
    """Whose an image is."""

    guest: str
    format: str
    """As its definition has it; "" where that says nothing of it."""


_NO_VOLUME = (libvirt.VIR_ERR_NO_STORAGE_POOL, libvirt.VIR_ERR_NO_STORAGE_VOL)
_MANY = Seconds(60.0)
"""Some calls for each guest, on a host that may be far away."""


async def of_all(hypervisor: Hypervisor) -> Mapping[str, User]:
    """Images of all guests, by path. Raises HypervisorError, also for a pool that is off: nobody
    knows what is in it."""
    return await _of(hypervisor, None, _NO_VOLUME)


async def of_others(hypervisor: Hypervisor, uuid: str) -> Mapping[str, User]:
    """Images of all guests but one, by path, but those in pools that are off.

    Raises HypervisorError.
    """
    return await _of(hypervisor, uuid, (*_NO_VOLUME, libvirt.VIR_ERR_OPERATION_INVALID))


async def _of(
    hypervisor: Hypervisor, but: str | None, forgiven: tuple[int, ...]
) -> Mapping[str, User]:

    def read(connection: libvirt.virConnect) -> Mapping[str, User]:
        found: dict[str, User] = {}
        for domain in connection.listAllDomains():
            if domain.UUIDString() == but:
                continue
            for text in _definitions(domain):
                volumes = _volumes(connection, text, forgiven)
                for path, format_ in {**images_in(text), **volumes}.items():
                    if path not in found or format_:
                        found[path] = User(domain.name(), format_)
        return found

    return await hypervisor.query("reading which images are in use", read, limit=_MANY)


def _definitions(domain: libvirt.virDomain) -> list[str]:
    """As it runs and as it is stored; none if it went away while we were reading."""
    try:
        texts = [domain.XMLDesc(0)]
        if domain.isPersistent():
            texts.append(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE))
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != libvirt.VIR_ERR_NO_DOMAIN:
            raise
        return []
    return texts


def _volumes(connection: libvirt.virConnect, xml: str, forgiven: tuple[int, ...]) -> dict[str, str]:
    """Images that a definition names by their pool and volume."""
    found: dict[str, str] = {}
    for disk in domain_xml.tree(xml, "domain").iterfind("devices/disk[@type='volume']"):
        driver, source = disk.find("driver"), disk.find("source")
        if source is None:
            continue
        try:
            pool = connection.storagePoolLookupByName(source.get("pool", ""))
            path = pool.storageVolLookupByName(source.get("volume", "")).path()
        except libvirt.libvirtError as exc:
            if exc.get_error_code() not in forgiven:
                raise
            continue
        if path.startswith("/"):
            found[path] = driver.get("type", "raw") if driver is not None else "raw"
    return found


def images_in(xml: str) -> dict[str, str]:
    """Paths and formats of a guest's images, with what is known of the files below them, and of its
    NVRAM. Raises ValueError."""
    root = domain_xml.tree(xml, "domain")
    found: dict[str, str] = {}
    for disk in root.findall("devices/disk"):
        # Those below come with formats of their own, and are told by the one above anyway.
        found |= {node.get("file") or node.get("dev") or "": "" for node in disk.iter("source")}
        driver, source = disk.find("driver"), disk.find("source")
        if source is not None:
            path = source.get("file") or source.get("dev") or ""
            found[path] = driver.get("type", "raw") if driver is not None else "raw"
    for node in root.findall("os/nvram"):
        found[(node.text or "").strip()] = ""
    return {path: format_ for path, format_ in found.items() if path.startswith("/")}
