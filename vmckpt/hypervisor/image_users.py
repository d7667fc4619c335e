"""Which files a host's guests have for images, whether they run or not."""

from collections.abc import Mapping
from dataclasses import dataclass

import libvirt

from vmckpt.hypervisor import parse
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.units import Seconds


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

    return await hypervisor.ask("reading which images are in use", read, limit=_MANY)


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
    for disk in parse.tree(xml, "domain").iterfind("devices/disk[@type='volume']"):
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
    root = parse.tree(xml, "domain")
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
