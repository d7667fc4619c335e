"""Ask a host's libvirt which resources it has, and whether it would start a guest."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Answer, Resource
from vmckpt.hypervisor import domain_xml, storage
from vmckpt.hypervisor.connection import Hypervisor

_ABSENT = (
    libvirt.VIR_ERR_NO_SECRET, libvirt.VIR_ERR_NO_NWFILTER, libvirt.VIR_ERR_NO_NETWORK,
    libvirt.VIR_ERR_NO_STORAGE_POOL, libvirt.VIR_ERR_NO_STORAGE_VOL, libvirt.VIR_ERR_NO_NODE_DEVICE,
)  # fmt: skip
_USAGES = (
    libvirt.VIR_SECRET_USAGE_TYPE_VOLUME, libvirt.VIR_SECRET_USAGE_TYPE_CEPH,
    libvirt.VIR_SECRET_USAGE_TYPE_ISCSI, libvirt.VIR_SECRET_USAGE_TYPE_VTPM,
)  # fmt: skip


async def ask(hypervisor: Hypervisor, wanted: Iterable[Resource]) -> dict[Resource, Answer]:
    """Return libvirt's answer about each resource. Raises HypervisorError.

    Resources about which libvirt gives no answer are left out.
    """
    asked = [one for one in wanted if one.kind in _QUESTIONS]
    if not asked:
        return {}

    def read(connection: libvirt.virConnect) -> dict[Resource, Answer]:
        found, host = {}, _Host(connection)
        for one in asked:
            answer = _answer(host, one)
            if answer is not None:
                found[one] = answer
        return found

    return await hypervisor.query("looking for what the guest needs", read)


class _Host:
    """A connection, with the host's capabilities, which are read once if needed."""

    def __init__(self, connection: libvirt.virConnect) -> None:
        self.connection = connection

    @cached_property
    def capabilities(self) -> ET.Element:
        return domain_xml.tree(self.connection.getCapabilities(), "capabilities")


def _answer(host: _Host, wanted: Resource) -> Answer | None:
    try:
        return _QUESTIONS[wanted.kind](host, wanted.name)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() in _ABSENT:
            return Answer.ABSENT
        if host.connection.isAlive() != 1:
            raise
        return None  # this host's libvirt lacks the driver, or forbids the question


def _secret(host: _Host, name: str) -> Answer:
    secret = None
    if domain_xml.UUID.fullmatch(name):
        secret = host.connection.secretLookupByUUIDString(name)
    for usage in _USAGES:
        if secret is None:
            secret = _by_usage(host, usage, name)
    if secret is None:
        return Answer.ABSENT
    try:
        secret.value()
    except libvirt.libvirtError as exc:
        if exc.get_error_code() == libvirt.VIR_ERR_NO_SECRET:
            return Answer.NO_VALUE
        # A private secret has a value that only libvirt itself may read.
    return Answer.PRESENT


def _by_usage(host: _Host, usage: int, name: str) -> libvirt.virSecret | None:
    try:
        return host.connection.secretLookupByUsage(usage, name)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != libvirt.VIR_ERR_NO_SECRET:
            raise
        return None


def _nwfilter(host: _Host, name: str) -> Answer:
    host.connection.nwfilterLookupByName(name)
    return Answer.PRESENT


def _network(host: _Host, name: str) -> Answer:
    active = host.connection.networkLookupByName(name).isActive()
    return Answer.PRESENT if active else Answer.INACTIVE


def _pool(host: _Host, name: str) -> Answer:
    active = host.connection.storagePoolLookupByName(name).isActive()
    return Answer.PRESENT if active else Answer.INACTIVE


def _volume(host: _Host, name: str) -> Answer | None:
    pool_name, _, volume = name.partition("/")
    try:
        pool = host.connection.storagePoolLookupByName(pool_name)
    except libvirt.libvirtError as exc:
        if exc.get_error_code() != libvirt.VIR_ERR_NO_STORAGE_POOL:
            raise
        return None  # the pool has a finding of its own
    if not pool.isActive():
        return None
    pool.storageVolLookupByName(volume)
    return Answer.PRESENT


def _pci(host: _Host, name: str) -> Answer:
    host.connection.nodeDeviceLookupByName("pci_" + name.replace(":", "_").replace(".", "_"))
    return Answer.PRESENT


def _usb(host: _Host, name: str) -> Answer:
    vendor, product = (f"0x{part}" for part in name.split(":"))
    flag = libvirt.VIR_CONNECT_LIST_NODE_DEVICES_CAP_USB_DEV
    for device in host.connection.listAllDevices(flag):
        node = domain_xml.tree(device.XMLDesc(), "device").find("capability[@type='usb_device']")
        ids = [] if node is None else [node.find("vendor"), node.find("product")]
        if [one.get("id") for one in ids if one is not None] == [vendor, product]:
            return Answer.PRESENT
    return Answer.ABSENT


def _vsock(host: _Host, cid: str) -> Answer:
    """Return PRESENT if the CID is free, so that the guest can have it; otherwise ABSENT."""
    active = libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
    taken = {
        node.get("address")
        for domain in host.connection.listAllDomains(active)
        for node in domain_xml.tree(domain.XMLDesc(), "domain").findall("devices/vsock/cid")
    }
    return Answer.ABSENT if cid in taken else Answer.PRESENT


def _cpu(host: _Host, name: str) -> Answer | None:
    return _in(name, _cells(host, "cpus/cpu"))


def _node(host: _Host, name: str) -> Answer | None:
    return _in(name, _cells(host, "."))


def _cells(host: _Host, path: str) -> set[str]:
    cells = host.capabilities.findall("host/topology/cells/cell")
    return {node.get("id", "") for cell in cells for node in cell.findall(path)}


def _in(name: str, known: set[str]) -> Answer | None:
    if not known:
        return None  # the host reports no topology
    return Answer.PRESENT if name in known else Answer.ABSENT


def _security(host: _Host, name: str) -> Answer:
    known = {node.text for node in host.capabilities.findall("host/secmodel/model")}
    return Answer.PRESENT if name in known else Answer.ABSENT


_QUESTIONS: Mapping[Kind, Callable[[_Host, str], Answer | None]] = {
    Kind.SECRET: _secret, Kind.NWFILTER: _nwfilter, Kind.NETWORK: _network, Kind.POOL: _pool,
    Kind.VOLUME: _volume, Kind.PCI_DEVICE: _pci, Kind.USB_DEVICE: _usb, Kind.VSOCK_CID: _vsock,
    Kind.CPU: _cpu, Kind.NUMA_NODE: _node, Kind.SECURITY_MODEL: _security,
}  # fmt: skip


async def volumes(hypervisor: Hypervisor, xml: str) -> dict[str, str]:
    """Return the paths of the disks that name a storage pool and a volume, by the disk's name.

    Volumes for which libvirt gives no absolute path are left out. Raises HypervisorError.
    """
    if "volume=" not in xml:
        return {}
    return await hypervisor.query(
        "looking for volumes", lambda connection: storage.volume_paths(connection, xml)
    )


_NO_REFUSALS = (
    libvirt.VIR_ERR_NO_SUPPORT, libvirt.VIR_ERR_OPERATION_DENIED, libvirt.VIR_ERR_ACCESS_DENIED,
    libvirt.VIR_ERR_CPU_INCOMPATIBLE,
)  # fmt: skip
"""Errors of a dry start that do not concern the definition; the CPU has a check of its own."""
_CRASHES = ("interface", "hostdev")
"""Devices that are left out of a dry start: with <interface type='hostdev'>, libvirtd 9.0.0 crashes
in domainXMLToNative. That call replaces every network card with a simpler card anyway."""


async def refusal(hypervisor: Hypervisor, xml: str) -> str | None:
    """Let a host's libvirt make QEMU's command line for a guest, without starting the guest.

    libvirt checks the definition, except network cards and host devices, against its own version,
    the host and QEMU, but opens no image and creates nothing. Returns libvirt's reason if libvirt
    would refuse to start the guest; None if not, or if the answer is unknown, as over a read-only
    connection. Raises HypervisorError.

    `xml`: the running guest's XML as it would be sent to the host, with passwords.
    """
    if hypervisor.host.read_only:
        return None  # libvirt permits this call only if the connection may start guests
    root = domain_xml.tree(xml, "domain")
    for devices in root.findall("devices"):
        for node in [one for one in devices if one.tag in _CRASHES]:
            devices.remove(node)
    text = ET.tostring(root, encoding="unicode")

    def check(connection: libvirt.virConnect) -> str | None:
        try:
            connection.domainXMLToNative("qemu-argv", text, 0)
        except libvirt.libvirtError as exc:
            if connection.isAlive() != 1:
                raise
            if exc.get_error_code() not in _NO_REFUSALS:
                return " ".join(str(exc).split())
        return None

    return await hypervisor.query("checking the guest's definition", check)
