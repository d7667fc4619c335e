"""The table of all elements of a domain XML that name something on the host. Pure.

Each row specifies how the resource is checked on the target of a move. A test compares the table
with libvirt's schema, so that no element is forgotten.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.finding import Severity


class Kind(StrEnum):
    """A kind of resource, which determines how the resource is checked."""

    FILE = "file"
    DIRECTORY = "directory of a file that libvirt or QEMU creates"
    DEVICE = "device node"
    SOCKET = "socket of a running service"
    SECRET = "libvirt secret"
    NWFILTER = "libvirt network filter"
    NETWORK = "libvirt network"
    POOL = "libvirt storage pool"
    VOLUME = "volume of a libvirt storage pool"
    USB_DEVICE = "USB device of the host"
    PCI_DEVICE = "PCI device of the host"
    ADDRESS = "address to listen on"
    PORT = "TCP port to listen on"
    CPU = "host CPUs"
    NUMA_NODE = "host NUMA nodes"
    HUGE_PAGES = "free huge pages"
    SECURITY_MODEL = "security driver of libvirt"
    VSOCK_CID = "vsock CID"
    DISK = "disk image"
    """Preflight compares this image between both hosts in its checks of disks."""
    CARD = "bridge, interface or network of a network card"
    """Preflight checks this resource in its checks of network cards."""
    UNCHECKED = "unchecked"
    """The resource is not checked before the move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """How a kind of resource is checked, and the finding if the target lacks the resource."""

    how: str
    code: str
    noun: str
    plural: str = ""
    """Plural of the noun; empty: the noun with an "s"."""
    hint: str
    """May contain {name}, {pool}, {guest}, {source} and {target}."""


_BY_SSH, _BY_LIBVIRT = "ssh: ", "libvirt: "
CHECKS = {
    Kind.FILE: Check(
        how=_BY_SSH + "the file exists", code="file-missing", noun="file",
        hint="copy the file from {source}",
    ),
    Kind.DIRECTORY: Check(
        how=_BY_SSH + "the directory exists", code="directory-missing", noun="directory",
        plural="directories",
        hint="run mkdir -p {name} on {target}",
    ),
    Kind.DEVICE: Check(
        how=_BY_SSH + "the device node exists", code="device-missing", noun="device",
        hint="choose a host with this device, or detach the device from {guest}",
    ),
    Kind.SOCKET: Check(
        how=_BY_SSH + "the socket exists", code="socket-missing", noun="socket",
        hint="start the service that provides the socket on {target}",
    ),
    Kind.SECRET: Check(
        how=_BY_LIBVIRT + "the secret exists and has a value", code="secret-missing",
        noun="secret",
        hint="save the secret's definition with virsh secret-dumpxml UUID on {source}, then run"
        " virsh secret-define FILE and virsh secret-set-value UUID --file VALUE on {target}",
    ),
    Kind.NWFILTER: Check(
        how=_BY_LIBVIRT + "the filter exists", code="nwfilter-missing", noun="network filter",
        hint="save the filter's definition with virsh nwfilter-dumpxml {name} on {source}, and run"
        " virsh nwfilter-define FILE on {target}",
    ),
    Kind.NETWORK: Check(
        how=_BY_LIBVIRT + "the network is active", code="network-missing", noun="network",
        hint="save the network's definition with virsh net-dumpxml {name} on {source}, then run"
        " virsh net-define FILE and virsh net-start {name} on {target}",
    ),
    Kind.POOL: Check(
        how=_BY_LIBVIRT + "the pool is active", code="pool-missing", noun="storage pool",
        hint="save the pool's definition with virsh pool-dumpxml {name} on {source}, then run virsh"
        " pool-define FILE and virsh pool-start {name} on {target}",
    ),
    Kind.VOLUME: Check(
        how=_BY_LIBVIRT + "the volume exists", code="volume-missing", noun="volume",
        hint="run virsh pool-refresh {pool} on {target} if the volume is new",
    ),
    Kind.USB_DEVICE: Check(
        how=_BY_LIBVIRT + "the device is connected", code="host-device-missing",
        noun="USB device", hint="connect the device to {target}, or detach it from {guest}",
    ),
    Kind.PCI_DEVICE: Check(
        how=_BY_LIBVIRT + "the device exists", code="host-device-missing", noun="PCI device",
        hint="choose a host with a device at this address, or detach the device from {guest}",
    ),
    Kind.ADDRESS: Check(
        how=_BY_SSH + "the host has the address", code="address-missing", noun="address",
        plural="addresses",
        hint="add the address to {target}, or use listen address 0.0.0.0 and restart {guest}",
    ),
    Kind.PORT: Check(
        how=_BY_SSH + "no program listens on the port", code="port-in-use", noun="TCP port",
        hint="to find the program that listens on the port, run ss -ltnp on {target}",
    ),
    Kind.CPU: Check(
        how=_BY_LIBVIRT + "the host has the CPUs", code="cpu-missing", noun="host CPU",
        hint="pin {guest} to CPUs that {target} has, with virsh vcpupin {guest} VCPU CPUS, virsh"
        " emulatorpin {guest} CPUS or virsh iothreadpin {guest} IOTHREAD CPUS on {source}",
    ),
    Kind.NUMA_NODE: Check(
        how=_BY_LIBVIRT + "the host has the NUMA nodes", code="numa-node-missing",
        noun="host NUMA node",
        hint="choose a host with this NUMA node, or change <numatune> and restart {guest}",
    ),
    Kind.HUGE_PAGES: Check(
        how=_BY_SSH + "enough pages of this size are free", code="huge-pages-short",
        noun="huge pages", plural="huge pages",
        hint="run virsh allocpages KIB COUNT --all on {target} (KIB is the page size), or choose"
        " another host",
    ),
    Kind.SECURITY_MODEL: Check(
        how=_BY_LIBVIRT + "the driver is active", code="security-model-missing",
        noun="security driver", hint="choose a host with the same security_driver in qemu.conf",
    ),
    Kind.VSOCK_CID: Check(
        how=_BY_LIBVIRT + "no guest there uses the CID", code="vsock-cid-in-use", noun="vsock CID",
        hint="use <cid auto='yes'/> in one of the guests and restart it",
    ),
    Kind.DISK: Check(
        how=_BY_SSH + "both hosts have the same file or device", code="storage-not-visible",
        noun="image", hint="see the findings about disks",
    ),
    Kind.CARD: Check(
        how="libvirt, ssh: the network is active, or the interface exists",
        code="network-missing", noun="network", hint="see the findings about networks",
    ),
    Kind.UNCHECKED: Check(
        how="not checked: a warning names it", code="not-checked", noun="",
        hint="make sure that {target} has it",
    ),
}  # fmt: skip


WAITING = ("-incoming", "defer")
"""Arguments with which QEMU waits for memory: those of a standby, and of a guest that was one."""


@dataclass(frozen=True, slots=True)
class Row:
    """An element or attribute of a domain XML that names a resource of the host."""

    path: str
    """Path of the element below `domain`, as for `xml.etree.ElementTree`."""
    value: str
    """"@name" for an attribute, "" for the element's text."""
    kind: Kind
    severity: Severity = Severity.BLOCKER

    @property
    def in_schema(self) -> str:
        """The path without conditions, as the test of libvirt's schema spells it."""
        bare = "/".join(step.partition("[")[0] for step in self.path.replace(QEMU, "").split("/"))
        return f"{bare}/{self.value}" if self.value else bare


QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
"""Namespace of arguments that libvirt passes to QEMU unchanged."""
CHARACTER_DEVICES = ("serial", "parallel", "console", "channel", "redirdev", "smartcard")
_MAX_DEPTH = 3
"""Backing files below this depth are named by the image itself, and are not in the table."""


def _character_devices() -> Iterator[Row]:
    """Yield the rows of all devices with a backend like that of a serial port."""
    for base in (*(f"devices/{tag}" for tag in CHARACTER_DEVICES), "devices/rng/backend"):
        typed = base + "[@type='{}']/source"
        yield Row(typed.format("dev"), "@path", Kind.DEVICE)
        yield Row(typed.format("file"), "@path", Kind.DIRECTORY)
        yield Row(typed.format("pipe"), "@path", Kind.FILE)
        yield Row(typed.format("unix") + "[@mode='bind']", "@path", Kind.DIRECTORY)
        yield Row(typed.format("unix") + "[@mode='connect']", "@path", Kind.SOCKET)
        for protocol in ("tcp", "udp"):
            where = typed.format(protocol) + "[@mode='bind']"
            yield Row(where, "@host", Kind.ADDRESS)
            if protocol == "tcp":
                yield Row(where, "@service", Kind.PORT)
        yield Row(f"{base}/log", "@file", Kind.DIRECTORY)


def _image(base: str) -> Iterator[Row]:
    """Yield the rows of one image: a disk's own, or one in its chain of backing files."""
    for name in ("@file", "@dev", "@dir"):
        yield Row(base, name, Kind.DISK)
    yield Row(base, "@path", Kind.SOCKET)  # of a vhost-user-blk server
    yield Row(base, "@pool", Kind.POOL)
    yield Row(base, "@volume", Kind.VOLUME)
    yield Row(f"{base}/host", "@socket", Kind.SOCKET)
    yield Row(f"{base}/config", "@file", Kind.FILE)
    yield Row(f"{base}/identity", "@keyfile", Kind.FILE)
    yield Row(f"{base}/knownHosts", "@path", Kind.FILE)
    yield Row(f"{base}/reservations/source", "@path", Kind.SOCKET)
    for secret in (f"{base}/auth/secret", f"{base}/encryption/secret"):
        yield Row(secret, "@uuid", Kind.SECRET)
        yield Row(secret, "@usage", Kind.SECRET)
    yield Row(f"{base}/dataStore/source", "@file", Kind.DISK)


def _disks() -> Iterator[Row]:
    for depth in range(_MAX_DEPTH):
        yield from _image("devices/disk" + "/backingStore" * depth + "/source")
    yield from _image("os/nvram/source")
    for secret in ("devices/disk/auth/secret", "devices/disk/encryption/secret"):
        yield Row(secret, "@uuid", Kind.SECRET)
        yield Row(secret, "@usage", Kind.SECRET)


def _cards() -> Iterator[Row]:
    for name in ("@bridge", "@network", "@dev", "@name", "@switchid", "@portgroupid", "@portid"):
        yield Row("devices/interface/source", name, Kind.CARD)
    base = "devices/interface[@type='{}']"
    yield Row(base.format("vhostuser") + "/source[@mode='client']", "@path", Kind.SOCKET)
    yield Row(base.format("vhostuser") + "/source[@mode='server']", "@path", Kind.DIRECTORY)
    yield Row(base.format("ethernet") + "/target[@managed='no']", "@dev", Kind.CARD)
    yield Row(base.format("server") + "/source", "@address", Kind.ADDRESS)
    yield Row(base.format("server") + "/source", "@port", Kind.PORT)
    yield Row(base.format("udp") + "/source/local", "@address", Kind.ADDRESS)
    yield Row("devices/interface/filterref", "@filter", Kind.NWFILTER)
    yield Row("devices/interface/script", "@path", Kind.FILE)
    yield Row("devices/interface/downscript", "@path", Kind.FILE)
    yield Row("devices/interface/backend", "@tap", Kind.DEVICE)
    yield Row("devices/interface/backend", "@vhost", Kind.DEVICE)
    yield Row("devices/interface/backend", "@logFile", Kind.DIRECTORY)
    yield Row("devices/interface/rom", "@file", Kind.FILE)
    yield Row("devices/interface/portForward", "@address", Kind.ADDRESS)
    yield Row("devices/interface/portForward", "@dev", Kind.UNCHECKED, Severity.WARNING)
    yield Row("devices/interface/portForward/range", "@start", Kind.PORT)


def _screens() -> Iterator[Row]:
    yield Row("devices/graphics", "@listen", Kind.ADDRESS)
    yield Row("devices/graphics/listen[@type='address']", "@address", Kind.ADDRESS)
    yield Row("devices/graphics/listen[@type='network']", "@network", Kind.NETWORK)
    yield Row("devices/graphics/listen[@type='socket']", "@socket", Kind.DIRECTORY)
    yield Row("devices/graphics", "@socket", Kind.DIRECTORY)
    for port in ("@port", "@tlsPort", "@websocket"):
        # Without autoport='no', the target's libvirt chooses another port.
        yield Row("devices/graphics[@autoport='no']", port, Kind.PORT)
    yield Row("devices/graphics/gl", "@rendernode", Kind.DEVICE)
    yield Row("devices/video/model/acceleration", "@rendernode", Kind.DEVICE)
    yield Row("devices/graphics", "@xauth", Kind.FILE)
    yield Row("devices/audio", "@path", Kind.DIRECTORY)
    for way in ("input", "output"):
        yield Row(f"devices/audio[@type='oss']/{way}", "@dev", Kind.DEVICE)
        yield Row(f"devices/audio/{way}", "@serverName", Kind.UNCHECKED, Severity.WARNING)
    yield Row("devices/audio", "@serverName", Kind.UNCHECKED, Severity.WARNING)
    yield Row("devices/graphics", "@display", Kind.UNCHECKED, Severity.WARNING)
    yield Row("devices/graphics[@type='dbus']", "@address", Kind.UNCHECKED, Severity.WARNING)


def _placement() -> Iterator[Row]:
    yield Row("vcpu", "@cpuset", Kind.CPU)
    for pinned in ("vcpupin", "emulatorpin", "iothreadpin"):
        yield Row(f"cputune/{pinned}", "@cpuset", Kind.CPU)
    yield Row("numatune/memory", "@nodeset", Kind.NUMA_NODE)
    yield Row("numatune/memnode", "@nodeset", Kind.NUMA_NODE)
    yield Row("devices/memory/source/nodemask", "", Kind.NUMA_NODE)
    yield Row("memoryBacking/hugepages", "", Kind.HUGE_PAGES)
    yield Row("blkiotune/device/path", "", Kind.DEVICE)
    for tuned in ("cachetune", "memorytune"):
        yield Row(f"cputune/{tuned}", "@vcpus", Kind.UNCHECKED, Severity.WARNING)


def _others() -> Iterator[Row]:
    for boot in ("kernel", "initrd", "dtb", "loader", "acpi/table", "shim"):
        yield Row(f"os/{boot}", "", Kind.FILE)
    yield Row("os/nvram", "@template", Kind.FILE)
    yield Row("sysinfo/entry", "@file", Kind.FILE)
    yield Row("devices/emulator", "", Kind.FILE)
    yield Row("devices/hostdev/rom", "@file", Kind.FILE)
    for secret in ("@uuid", "@usage"):
        yield Row("devices/hostdev/source/auth/secret", secret, Kind.SECRET)
    yield Row("devices/hostdev[@type='usb']/source", "", Kind.USB_DEVICE)
    yield Row("devices/hostdev[@type='pci']/source", "", Kind.PCI_DEVICE)
    yield Row("devices/interface[@type='hostdev']/source", "", Kind.PCI_DEVICE)
    yield Row("devices/input[@type='evdev']/source", "@dev", Kind.DEVICE)
    yield Row("devices/input[@type='passthrough']/source", "@evdev", Kind.DEVICE)
    yield Row("devices/memory/source/path", "", Kind.FILE)
    yield Row("devices/rng/backend[@model='random']", "", Kind.DEVICE)
    yield Row("devices/smartcard/database", "", Kind.FILE)
    yield Row("devices/shmem/server", "@path", Kind.SOCKET)
    yield Row("devices/tpm/backend/device", "@path", Kind.DEVICE)
    yield Row("devices/tpm/backend/encryption", "@secret", Kind.SECRET)
    yield Row("devices/tpm/backend[@type='external']/source", "@path", Kind.SOCKET)
    yield Row("devices/tpm/backend[@type='emulator']/source[@type='file']", "@path",
              Kind.DIRECTORY)  # fmt: skip
    yield Row("devices/tpm/backend[@type='emulator']/source[@type='dir']", "@path",
              Kind.DIRECTORY)  # fmt: skip
    yield Row("devices/pstore/path", "", Kind.DIRECTORY)
    yield Row("devices/vsock/cid[@auto='no']", "@address", Kind.VSOCK_CID)
    yield Row("devices/filesystem/source", "@dir", Kind.FILE)
    yield Row("devices/filesystem/binary", "@path", Kind.FILE)
    yield Row(QEMU + "commandline/" + QEMU + "arg", "@value", Kind.UNCHECKED, Severity.WARNING)
    yield Row("devices/filesystem/source", "@socket", Kind.SOCKET)
    yield Row("devices/lease/lockspace", "", Kind.UNCHECKED, Severity.WARNING)
    yield Row("devices/lease/target", "@path", Kind.FILE)
    yield Row("seclabel[@type='static']", "@model", Kind.SECURITY_MODEL)


ROWS: tuple[Row, ...] = (
    *_disks(), *_cards(), *_character_devices(), *_screens(), *_placement(), *_others(),
)  # fmt: skip
