"""Every place of libvirt's schema that names something of the host is in the table, or harmless."""

from fnmatch import fnmatchcase
from string import Formatter

from tests.support import host_resources_table
from tests.support.libvirt_schema import naming_places
from vmckpt.definition.host_resources import CHECKS, ROWS, Kind

HARMLESS = {
    # place: why a target need not be asked
    "name": "the guest's own name",
    "title": "text", "description": "text", "uuid": "the guest's own", "genid": "the guest's own",
    "bootloader*": "only Xen", "capabilities/*": "only LXC", "namespace/*": "only LXC",
    "datacenterpath": "only VMware", "features/xen/*": "only Xen", "os/init*": "only LXC",
    "os/root": "only Xen", "commandline/env/@value": "belongs to the arguments, which are named",
    "override/*": "properties of QEMU's devices",
    "cpu/*": "the target compares the CPU",
    "cputune/cachetune/@id": "read by libvirt only", "cputune/*/monitor/@vcpus": "vCPUs",
    "cputune/*sched/*": "vCPUs and threads of the guest",
    "devices/*/address/@*": "addresses inside the guest",
    "devices/*/boot/@loadparm": "read by the guest's firmware",
    "devices/*/target/@*": "seen by the guest", "devices/audio/*": "names of streams",
    "devices/*/source/@channel": "name of a SPICE port, which QEMU creates",
    "devices/*/source/@mode": "a mode",
    "devices/*/source/@master": "only bhyve", "devices/*/source/@slave": "only bhyve",
    "devices/*/@tty": "a pseudo terminal, which QEMU creates",
    "devices/*/seclabel/*": "the security driver is checked",
    "devices/*/cookies/*": "sent to the server",
    "devices/*/auth/@username": "sent to the server", "devices/*/encryption/cipher/*": "a method",
    "devices/*/encryption/ivgen/*": "a method", "devices/*/host/@name": "a server on the network",
    "devices/*/identity/*": "sent to the server", "devices/*/initiator/iqn/@name": "sent to it",
    "devices/*/snapshot/@name": "on the server", "devices/*/source/@name": "on the server",
    "devices/*/source/@query": "sent to the server",
    "devices/*/source/@tlsHostname": "name in the server's certificate",
    "devices/disk/source/@fdgroup": "only with descriptors that libvirt's client passes",
    "devices/filesystem/source/@*": "only LXC", "devices/graphics/@keymap": "part of QEMU",
    "devices/graphics/@passwd": "a password",
    "devices/hostdev/*": "devices with which no guest migrates, but USB and PCI devices",
    "devices/interface/backenddomain/@name": "only Xen", "devices/interface/guest/@*": "only LXC",
    "devices/interface/*ip/@*": "set by the guest", "devices/interface/*route/@*": "set by it",
    "devices/interface/model/@type": "part of QEMU",
    "devices/interface/portForward/range/@*": "the first port of the range is checked",
    "devices/interface/source/@portgroup": "libvirt uses none if it is missing",
    "devices/interface/source/local/@port": "UDP; not checked",
    "devices/interface/virtualport/*": "read by the switch",
    "devices/lease/key": "in the lockspace", "devices/memory/uuid": "label of the memory",
    "devices/shmem/@name": "QEMU creates the shared memory",
    "devices/smartcard/certificate": "in the database, which is checked",
    "features/*": "seen by the guest", "launchSecurity/*": "no such guest migrates",
    "memoryBacking/hugepages/page/@nodeset": "NUMA nodes of the guest",
    "os/cmdline": "read by the guest", "os/nvram": "its content moves with the guest",
    "os/nvram/source*": "as for a disk, whose paths are in the table",
    "os/type/@machine": "the target's machine types are compared",
    "resource/*": "libvirt creates the partition", "seclabel/*": "the security driver is checked",
    "sysinfo/*": "read by the guest",
}  # fmt: skip


def test_every_place_that_may_name_something_of_the_host_is_known() -> None:
    checked = {row.in_schema for row in ROWS}
    left = [
        place for place in naming_places()
        if place not in checked and not any(fnmatchcase(place, one) for one in HARMLESS)
    ]  # fmt: skip
    # Backing files are described like the images above them.
    assert [one for one in left if "backingStore/" not in one] == []


def test_every_harmless_pattern_is_needed() -> None:
    checked = {row.in_schema for row in ROWS}
    places = [place for place in naming_places() if place not in checked]

    assert [one for one in HARMLESS if not any(fnmatchcase(place, one) for place in places)] == []


def test_the_schema_is_read_whole() -> None:
    places = naming_places()

    assert "devices/disk/source/@file" in places
    assert "devices/serial/source/@path" in places
    assert len(places) > 400


def test_each_kind_is_checked_in_a_stated_way_with_a_hint_that_can_be_filled_in() -> None:
    known = {"name", "pool", "guest", "source", "target"}

    assert set(CHECKS) == set(Kind)
    for check in CHECKS.values():
        assert check.how
        assert check.hint
        assert {field for _, field, _, _ in Formatter().parse(check.hint) if field} <= known
    assert {row.kind for row in ROWS} == set(Kind)


def test_the_documents_table_is_that_of_the_code() -> None:
    assert host_resources_table.table() in host_resources_table.DOCUMENT.read_text()
