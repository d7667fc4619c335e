from xml.etree import ElementTree as ET

import pytest

from tests.support import foreign
from vmckpt.definition.host_resources import Kind
from vmckpt.definition.needs import Resource, cpuset, needs
from vmckpt.model.finding import Severity

EMULATOR = "/usr/bin/qemu-system-x86_64"


def found(devices: str, more: str = "") -> list[tuple[Kind, str, str | None]]:
    xml = f"<domain type='kvm'>{more}<devices>{devices}</devices></domain>"
    return [(one.kind, one.name, one.device) for one in needs(ET.fromstring(xml))]


FOREIGN = {
    "preflight-disk-volume": [
        (Kind.POOL, "fast", "disk vda"), (Kind.VOLUME, "fast/web1.qcow2", "disk vda")],
    "preflight-disk-rbd-auth": [
        (Kind.SECRET, "0a81f5b2-8403-7b23-c8d6-21ccc2f80d6f", "disk vda")],
    "preflight-nic-nwfilter": [
        (Kind.NWFILTER, "clean-traffic", "network card 52:54:00:00:00:01")],
    "preflight-graphics-listen-addr-of-host": [
        (Kind.ADDRESS, "10.0.0.11", "graphics"), (Kind.PORT, "5901", "graphics")],
    "preflight-numatune-node-3": [(Kind.NUMA_NODE, "3", None)],
    "preflight-vcpupin-to-cpu-31-target-8": [(Kind.CPU, "30", None), (Kind.CPU, "31", None)],
    "preflight-nic-hostdev-teaming-transient": [
        (Kind.PCI_DEVICE, "0000:03:10.0", "network card 52:54:00:00:00:02")],
    "preflight-nic-vhostuser": [
        (Kind.DIRECTORY, "/run/ovs", "network card 52:54:00:00:00:01")],
    "preflight-fs-9p": [(Kind.FILE, "/srv", "filesystem")],
    "preflight-tpm-passthrough": [(Kind.DEVICE, "/dev/tpm0", "tpm")],
    "preflight-cdrom-startup-optional": [],
}  # fmt: skip


@pytest.mark.parametrize(("name", "wanted"), FOREIGN.items())
def test_what_a_definition_names_of_its_host_is_found(
    name: str, wanted: list[tuple[Kind, str, str | None]]
) -> None:
    told = [(one.kind, one.name, one.device) for one in needs(foreign.root(name))]

    assert told == [*wanted, (Kind.FILE, EMULATOR, None)] or set(told) == {
        *wanted, (Kind.FILE, EMULATOR, None)
    }  # fmt: skip


CHARACTER = [
    ("<serial type='file'><source path='/srv/log/a.log'/></serial>", Kind.DIRECTORY, "/srv/log"),
    ("<serial type='dev'><source path='/dev/ttyS0'/></serial>", Kind.DEVICE, "/dev/ttyS0"),
    ("<console type='pipe'><source path='/run/p'/></console>", Kind.FILE, "/run/p"),
    ("<channel type='unix'><source mode='bind' path='/run/x/s'/></channel>", Kind.DIRECTORY,
     "/run/x"),
    ("<channel type='unix'><source mode='connect' path='/run/x/s'/></channel>", Kind.SOCKET,
     "/run/x/s"),
    ("<serial type='tcp'><source mode='bind' host='10.0.0.1' service='4555'/></serial>",
     Kind.ADDRESS, "10.0.0.1"),
    ("<rng model='virtio'><backend model='egd' type='unix'><source mode='connect' path='/run/e'/>"
     "</backend></rng>", Kind.SOCKET, "/run/e"),
    ("<rng model='virtio'><backend model='random'>/dev/hwrng</backend></rng>", Kind.DEVICE,
     "/dev/hwrng"),
    ("<vsock model='virtio'><cid auto='no' address='42'/></vsock>", Kind.VSOCK_CID, "42"),
    ("<hostdev mode='subsystem' type='usb'><source><vendor id='0x1234'/><product id='0xbeef'/>"
     "</source></hostdev>", Kind.USB_DEVICE, "1234:beef"),
    ("<tpm model='tpm-crb'><backend type='emulator'><encryption secret='s'/></backend></tpm>",
     Kind.SECRET, "s"),
]  # fmt: skip


@pytest.mark.parametrize(("xml", "kind", "name"), CHARACTER)
def test_each_way_of_naming_something_is_read(xml: str, kind: Kind, name: str) -> None:
    assert (kind, name) in [(one, other) for one, other, _ in found(xml)]


NOTHING = [
    "<serial type='pty'><source path='/dev/pts/3'/></serial>",
    "<serial type='tcp'><source mode='connect' host='10.0.0.1' service='4555'/></serial>",
    "<channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/channel/a'/></channel>",
    "<graphics type='vnc' port='5901' autoport='yes' listen='0.0.0.0'/>",
    "<graphics type='vnc' port='-1' autoport='no'/>",
    "<rng model='virtio'><backend model='random'>/dev/urandom</backend></rng>",
    "<vsock model='virtio'><cid auto='yes' address='3'/></vsock>",
    "<hostdev mode='subsystem' type='usb'><source startupPolicy='optional'><vendor id='0x1'/>"
    "<product id='0x2'/></source></hostdev>",
]  # fmt: skip


@pytest.mark.parametrize("xml", NOTHING)
def test_what_every_host_has_or_libvirt_makes_is_not_asked_for(xml: str) -> None:
    assert found(xml) == []


def test_devices_of_one_kind_are_told_apart() -> None:
    serial = "<serial type='file'><source path='/srv/{}/log'/></serial>"
    assert [device for *_, device in found(serial.format("a") + serial.format("b"))] == [
        "serial 1", "serial 2",
    ]  # fmt: skip


def test_the_first_serial_port_which_libvirt_describes_twice_is_asked_for_once() -> None:
    port = "<{0} type='file'><source path='/srv/log/a'/></{0}>"
    assert found(port.format("serial") + port.format("console")) == [
        (Kind.DIRECTORY, "/srv/log", "serial")
    ]


def test_a_template_of_nvram_is_needed_only_if_the_target_lacks_the_file() -> None:
    more = "<os><nvram template='/usr/share/t.fd'>/var/lib/libvirt/qemu/nvram/w.fd</nvram></os>"
    (one,) = needs(ET.fromstring(f"<domain type='kvm'>{more}<devices/></domain>"))

    assert one == Resource(
        kind=Kind.FILE, name="/usr/share/t.fd", unless="/var/lib/libvirt/qemu/nvram/w.fd"
    )


PAGES = [
    ("", [""]), ("<page size='2048' unit='KiB'/>", ["2048"]), ("<page size='1' unit='G'/>",
     ["1048576"]), ("<page size='x'/>", []), ("<page size='2097152' unit='b'/>", ["2048"]),
]  # fmt: skip


@pytest.mark.parametrize(("pages", "sizes"), PAGES)
def test_huge_pages_are_named_by_their_size_in_kib(pages: str, sizes: list[str]) -> None:
    more = f"<memoryBacking><hugepages>{pages}</hugepages></memoryBacking>"
    assert [name for _, name, _ in found("", more)] == sizes


def test_arguments_for_qemu_cannot_be_checked() -> None:
    space = "http://libvirt.org/schemas/domain/qemu/1.0"
    more = f"<c:commandline xmlns:c='{space}'><c:arg value='-foo'/></c:commandline>"
    (one,) = needs(ET.fromstring(f"<domain type='kvm'>{more}<devices/></domain>"))

    assert (one.kind, one.name, one.severity) == (Kind.UNCHECKED, "-foo", Severity.WARNING)


SETS = [
    ("0-3,^2,7", {0, 1, 3, 7}), ("5", {5}), ("", set()), ("a", set()), ("1-x", set()),
    ("3-1", set()), ("0-99999999999", set()), (" 1 , 2 ", {1, 2}),
]  # fmt: skip


def test_a_guest_that_failed_over_needs_nothing_for_having_waited_as_a_standby() -> None:
    xml = (
        "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><qemu:commandline>"
        "<qemu:arg value='-incoming'/><qemu:arg value='defer'/><qemu:arg value='-S'/>"
        "</qemu:commandline></domain>"
    )
    assert [one.name for one in needs(ET.fromstring(xml))] == ["-S"]


@pytest.mark.parametrize(("text", "numbers"), SETS)
def test_a_set_of_cpus_is_read_as_libvirt_writes_it(text: str, numbers: set[int]) -> None:
    assert cpuset(text) == numbers
