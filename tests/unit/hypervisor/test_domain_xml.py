import libvirt
import pytest

from tests.support.guest_xml import MANY_DEVICES, stats
from vmckpt.hypervisor import domain_xml
from vmckpt.model.guest import Disk, GuestState, Nic
from vmckpt.model.migration import JobPhase
from vmckpt.units import Seconds


def test_a_guest_is_read_from_its_xml() -> None:
    guest = domain_xml.guest(
        MANY_DEVICES, state=1, persistent=True, autostart=True, snapshots=2, job="backup"
    )

    assert (guest.name, guest.state, guest.memory) == ("db <1>", GuestState.RUNNING, 1 << 30)
    assert (guest.machine, guest.arch, guest.accelerator) == ("pc-q35-7.2", "x86_64", "kvm")
    assert guest.disks == (
        Disk(target="vda", kind="file", source="/srv/a b.raw", cache="none", read_only=False,
             shareable=False),
        Disk(target="vdb", kind="network", source="pool/x", cache=None, read_only=False,
             shareable=False),
        Disk(target="sda", kind="file", source=None, cache=None, read_only=True, shareable=False,
             device="cdrom"),
    )  # fmt: skip
    assert guest.nics[:2] == (Nic(kind="network", source="lan"), Nic(kind="bridge", source="br0"))
    assert guest.host_devices == (
        "pci 0x0000 0x03 0x00 0x0", "network card 52:54:00:00:00:02",
    )  # fmt: skip
    assert guest.directories == ("tag",)
    assert guest.boot_files == ("/k", "/fw.fd")
    assert guest.shared_memory


def test_a_guest_with_the_barest_xml_is_read_too() -> None:
    guest = domain_xml.guest(
        "<domain/>", state=99, persistent=False, autostart=False, snapshots=0, job=None
    )

    assert (guest.state, guest.memory, guest.disks) == (GuestState.UNKNOWN, 0, ())


def test_a_sample_has_bytes_seconds_and_bytes_per_second() -> None:
    seen = domain_xml.job_sample(stats(), at=Seconds(5.0), paused=False, post_copy=False)

    assert (seen.iteration, seen.remaining, seen.total, seen.transferred) == (3, 1000, 2000, 9000)
    assert seen.dirty_rate == 5000 * 4096
    assert seen.bandwidth == 50_000_000
    assert seen.expected_downtime == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("iteration", "paused", "post_copy", "phase"),
    [
        (0, False, False, JobPhase.SETUP),
        (1, False, False, JobPhase.PRE_COPY),
        (3, True, False, JobPhase.SWITCHOVER),
        (3, True, True, JobPhase.POST_COPY),
    ],
)
def test_the_phase_follows_from_passes_and_state(
    iteration: int, paused: bool, post_copy: bool, phase: JobPhase
) -> None:
    seen = domain_xml.job_sample(
        stats(memory_iteration=iteration), at=Seconds(0.0), paused=paused, post_copy=post_copy
    )

    assert seen.phase is phase


def test_what_qemu_has_not_measured_yet_is_none_not_zero() -> None:
    seen = domain_xml.job_sample(
        stats(memory_dirty_rate=0, downtime=0), at=Seconds(0.0), paused=False, post_copy=False
    )

    assert (seen.dirty_rate, seen.expected_downtime) == (None, None)


def test_final_statistics_prefer_times_without_the_way_between_the_hosts() -> None:
    totals = domain_xml.job_totals(stats(downtime=185, downtime_net=184, time_elapsed=2524,
                                    time_elapsed_net=2523, setup_time=2))  # fmt: skip

    assert (totals.downtime, totals.total, totals.setup) == (0.184, 2.523, 0.002)


def test_only_an_outgoing_migration_is_one() -> None:
    assert domain_xml.is_migration(stats())
    assert not domain_xml.is_migration(stats(type=libvirt.VIR_DOMAIN_JOB_NONE))
    assert not domain_xml.is_migration(stats(operation=libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP))
    assert not domain_xml.is_migration({})


def test_versions_are_unpacked() -> None:
    assert domain_xml.version(7_002_022) == "7.2.22"


def test_a_card_on_a_network_is_the_networks_whatever_that_has_made_of_it() -> None:
    live = MANY_DEVICES.replace(
        "<interface type='bridge'><source bridge='br0'/></interface>",
        "<interface type='bridge'><source network='prod' portid='ab' bridge='br0'/></interface>"
        "<interface type='direct'><source network='mv' dev='eth0' mode='bridge'/></interface>",
    )
    found = domain_xml.guest(
        live, state=1, persistent=True, autostart=True, snapshots=0, job=None
    )  # fmt: skip
    assert Nic(kind="network", source="prod") in found.nics
    assert Nic(kind="network", source="mv") in found.nics


def test_files_that_a_disk_lies_on_are_known() -> None:
    chain = MANY_DEVICES.replace(
        "<source file='/srv/a b.raw'/>",
        "<source file='/srv/a b.raw'/><backingStore type='file'><format type='qcow2'/>"
        "<source file='/srv/middle.qcow2'/><backingStore type='file'><format type='raw'/>"
        "<source file='/srv/base.raw'/><backingStore/></backingStore></backingStore>",
    )
    found = domain_xml.guest(
        chain, state=1, persistent=True, autostart=True, snapshots=0, job=None
    )  # fmt: skip
    assert found.disks[0].below == ("/srv/middle.qcow2", "/srv/base.raw")
    assert found.disks[1].below == ()
    assert not found.disks[0].on_device
    device = chain.replace("<backingStore type='file'>", "<backingStore type='block'>", 1)
    found = domain_xml.guest(
        device, state=1, persistent=True, autostart=True, snapshots=0, job=None
    )  # fmt: skip
    assert found.disks[0].on_device


@pytest.mark.parametrize(
    ("unit", "size"),
    [
        ("b", 1), ("byte", 1), ("bytes", 1), ("KB", 1000), ("k", 1 << 10), ("KiB", 1 << 10),
        ("MB", 1000**2), ("M", 1 << 20), ("MiB", 1 << 20), ("GB", 1000**3), ("G", 1 << 30),
        ("GiB", 1 << 30), ("TB", 1000**4), ("T", 1 << 40), ("TiB", 1 << 40), ("PB", 1000**5),
        ("P", 1 << 50), ("PiB", 1 << 50), ("EB", 1000**6), ("E", 1 << 60), ("EiB", 1 << 60),
        ("gib", 1 << 30), ("", 1 << 10),
    ],
)  # fmt: skip
def test_every_unit_of_libvirt_is_read(unit: str, size: int) -> None:
    assert memory_of(f"<memory unit='{unit}'>4</memory>") == 4 * size


def test_memory_without_a_unit_is_in_kib() -> None:
    assert memory_of("<memory>4</memory>") == 4096


@pytest.mark.parametrize("unit", ["XiB", "Kib/s", "pages", "iB", "MMB"])
def test_an_unknown_unit_is_an_error(unit: str) -> None:
    with pytest.raises(ValueError, match=f"unknown unit '{unit}'"):
        memory_of(f"<memory unit='{unit}'>4</memory>")


def memory_of(element: str) -> int:
    xml = f"<domain type='kvm'><name>a</name><uuid>u</uuid>{element}</domain>"
    guest = domain_xml.guest(xml, state=1, persistent=True, autostart=False, snapshots=0, job=None)
    return guest.memory
