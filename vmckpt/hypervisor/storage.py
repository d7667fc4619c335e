"""Drives and image paths of a guest, and the image files in use by the guests of a host."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from shlex import quote
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import definition_text, domain_xml
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.disk import Drive
from vmckpt.units import Seconds

# Includes the secrets, such as console passwords, that libvirt leaves out by default.
_WHOLE = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE


async def drives(hypervisor: Hypervisor, uuid: str) -> tuple[Drive, ...]:
    """Return the guest's current drives. Raises HypervisorError."""
    return await hypervisor.query(
        "reading the guest's drives",
        lambda connection: read_drives(connection.lookupByUUIDString(uuid).XMLDesc()),
    )


def read_drives(xml: str) -> tuple[Drive, ...]:
    """Return the drives of a domain XML. Raises ValueError."""
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
        # libvirt does not probe formats; it assumes raw if the XML names no format.
        format=driver.get("type", "raw") if driver is not None else "raw",
        read_only=node.find("readonly") is not None,
        shareable=node.find("shareable") is not None,
        encrypted=any(found is not None for found in (_in(node), _in(source))),
    )


def _in(node: ET.Element | None) -> ET.Element | None:
    return node.find("encryption") if node is not None else None


def with_images_at(xml: str, paths: Mapping[str, str]) -> str:
    """Return a domain XML with new image paths.

    Security labels that apply only to the old images are removed; everything else is unchanged.
    `paths`: new image path of each disk, by disk name ("vda"). Raises ValueError.
    """
    root = domain_xml.tree(xml, "domain")
    changed = False
    for disk in root.findall("devices/disk"):
        target, source = disk.find("target"), disk.find("source")
        name = target.get("dev", "") if target is not None else ""
        if name in paths and source is not None and source.get("file") is not None:
            changed |= domain_xml.another_image(source) or source.get("file") != paths[name]
            source.set("file", paths[name])
    return definition_text.text(root, xml) if changed else xml


async def definitions_with_images_at(
    source: Hypervisor, uuid: str, paths: Mapping[str, str]
) -> tuple[str | None, str | None]:
    """Return the running guest's XML and its stored definition, with the target's image paths.

    The stored definition is None if the guest is transient. Both are None if the paths change
    nothing. `paths`: image path on the target of each disk, by disk name. Raises HypervisorError.
    """

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
    """Return the path of a directory on the target.

    `wish`: an absolute path, or the name of a libvirt storage pool. Raises BadInput if the pool
    does not exist, is inactive or cannot store files; HypervisorError if libvirt fails or gives no
    absolute path.
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
            host=name,
            hint=f"run virsh pool-list --all on {name}, or give a directory",
        ) from exc
    if kind not in ("dir", "fs", "netfs"):
        raise BadInput(
            f"{name}: storage pool {wish!r} ({kind}) cannot store files",
            host=name,
            hint="give a directory",
        )
    if not active:
        raise BadInput(
            f"{name}: storage pool {wish!r} is not active",
            host=name,
            hint=f"run virsh pool-start {quote(wish)} on {name}",
        )
    if not path.startswith("/"):
        raise HypervisorError(
            f"{name}: the path of storage pool {wish!r}, {path!r}, is not absolute", host=name
        )
    return path


@dataclass(frozen=True, slots=True)
class User:
    """The guest that uses an image, and the image's format."""

    guest: str
    format: str
    """Image format according to the guest's definition; "" for a backing file or NVRAM."""


_NO_VOLUME = (libvirt.VIR_ERR_NO_STORAGE_POOL, libvirt.VIR_ERR_NO_STORAGE_VOL)
_MANY = Seconds(60.0)
"""Time limit for reading all guests: several calls per guest, perhaps to a distant host."""


async def of_all(hypervisor: Hypervisor) -> Mapping[str, User]:
    """Return the guest that uses each image on a host, by the image's path.

    Volumes that do not exist are left out. Raises HypervisorError, also if a storage pool in use is
    inactive, since the pool's files are then unknown.
    """
    return await _of(hypervisor, None, _NO_VOLUME)


async def of_others(hypervisor: Hypervisor, uuid: str) -> Mapping[str, User]:
    """Return the guest that uses each image on a host, except guest `uuid`, by the image's path.

    Volumes that do not exist, or whose pool is inactive, are left out. Raises HypervisorError.
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
    """Return the current XML and, for a persistent guest, the stored XML.

    Returns an empty list if the guest disappeared meanwhile.
    """
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
    """Return the format of each image that a definition names by pool and volume, by path.

    `forgiven`: libvirt's error codes for which a volume is left out instead of raising.
    """
    found: dict[str, str] = {}
    for disk in domain_xml.tree(xml, "domain").iterfind("devices/disk[@type='volume']"):
        driver, source = disk.find("driver"), disk.find("source")
        if source is None:
            continue
        try:
            path = _volume_path(connection, source)
        except libvirt.libvirtError as exc:
            if exc.get_error_code() not in forgiven:
                raise
            continue
        if path.startswith("/"):
            found[path] = driver.get("type", "raw") if driver is not None else "raw"
    return found


def volume_paths(connection: libvirt.virConnect, xml: str) -> dict[str, str]:
    """Return the paths of disks that name a storage pool and a volume, by the disk's name.

    Volumes for which libvirt gives no absolute path are left out, for example volumes that this
    host does not have. Raises libvirtError if the connection broke, ValueError.
    """
    found = {}
    for disk in domain_xml.tree(xml, "domain").iterfind("devices/disk[@type='volume']"):
        source, target = disk.find("source"), disk.find("target")
        if source is None or target is None:
            continue
        try:
            path = _volume_path(connection, source)
        except libvirt.libvirtError:
            if connection.isAlive() != 1:
                raise
            continue
        if path.startswith("/"):
            found[target.get("dev", "?")] = path
    return found


def definition(domain: libvirt.virDomain, flags: int = 0) -> str:
    """Return a domain's XML with volumes of storage pools given by path.

    See `with_volumes_by_path`. `flags`: libvirt's VIR_DOMAIN_XML_*. Raises libvirtError,
    ValueError.
    """
    return with_volumes_by_path(domain.connect(), domain.XMLDesc(flags))


def with_volumes_by_path(connection: libvirt.virConnect, xml: str) -> str:
    """Return a domain XML in which files and block devices replace the volumes of storage pools.

    Volumes for which libvirt gives no absolute path are unchanged. Raises libvirtError if the
    connection broke, ValueError.
    """
    if "volume" not in xml:
        return xml
    paths = volume_paths(connection, xml)
    if not paths:
        return xml
    root = domain_xml.tree(xml, "domain")
    for disk in root.iterfind("devices/disk[@type='volume']"):
        source, target = disk.find("source"), disk.find("target")
        path = paths.get("?" if target is None else target.get("dev", "?"))
        if source is None or path is None:
            continue
        for key in ("pool", "volume", "mode"):
            source.attrib.pop(key, None)
        device = path.startswith("/dev/")
        disk.set("type", "block" if device else "file")
        source.set("dev" if device else "file", path)
    return definition_text.text(root, xml)


def _volume_path(connection: libvirt.virConnect, source: ET.Element) -> str:
    pool = connection.storagePoolLookupByName(source.get("pool", ""))
    return pool.storageVolLookupByName(source.get("volume", "")).path()


def images_in(xml: str) -> dict[str, str]:
    """Return the format of each image of a guest, by path. Includes backing files and NVRAM.

    The format of a disk is "raw" if the XML does not name a format; that of a backing file or NVRAM
    is "". Raises ValueError.
    """
    root = domain_xml.tree(xml, "domain")
    found: dict[str, str] = {}
    for disk in root.findall("devices/disk"):
        # Backing files have formats of their own, which the overlay's header records anyway.
        found |= {node.get("file") or node.get("dev") or "": "" for node in disk.iter("source")}
        driver, source = disk.find("driver"), disk.find("source")
        if source is not None:
            path = source.get("file") or source.get("dev") or ""
            found[path] = driver.get("type", "raw") if driver is not None else "raw"
    for node in root.findall("os/nvram"):
        found[(node.text or "").strip()] = ""
    return {path: format_ for path, format_ in found.items() if path.startswith("/")}
