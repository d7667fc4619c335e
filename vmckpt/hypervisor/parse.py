"""libvirt's XML and statistics, read once into our types; units are converted only here."""

from collections.abc import Mapping
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.model.guests import Disk, Guest, GuestState, Nic
from vmckpt.model.jobs import JobPhase, JobSample, JobTotals
from vmckpt.units import Bytes, BytesPerSecond, Seconds

# Namespace of our element in a domain's metadata.
LABELS = "urn:vmckpt:labels:1"

STATES = {
    libvirt.VIR_DOMAIN_NOSTATE: GuestState.UNKNOWN,
    libvirt.VIR_DOMAIN_RUNNING: GuestState.RUNNING,
    libvirt.VIR_DOMAIN_BLOCKED: GuestState.BLOCKED,
    libvirt.VIR_DOMAIN_PAUSED: GuestState.PAUSED,
    libvirt.VIR_DOMAIN_SHUTDOWN: GuestState.SHUTTING_DOWN,
    libvirt.VIR_DOMAIN_SHUTOFF: GuestState.SHUT_OFF,
    libvirt.VIR_DOMAIN_CRASHED: GuestState.CRASHED,
    libvirt.VIR_DOMAIN_PMSUSPENDED: GuestState.SUSPENDED,
}

_SCALE = {
    "b": 1,
    "bytes": 1,
    "kib": 1 << 10,
    "k": 1 << 10,
    "mib": 1 << 20,
    "m": 1 << 20,
    "gib": 1 << 30,
    "g": 1 << 30,
}


def guest(
    xml: str,
    *,
    state: tuple[int, int],
    persistent: bool,
    autostart: bool,
    snapshots: int,
    job: str | None,
) -> Guest:
    """A guest from its domain XML (the live one for a guest that runs) and what else was asked."""
    root = ET.fromstring(xml)
    devices = root.find("devices")
    memory = root.find("memory")
    kind = root.find("os/type")
    cpu = root.find("cpu")
    return Guest(
        name=root.findtext("name", ""),
        uuid=root.findtext("uuid", ""),
        state=STATES.get(state[0], GuestState.UNKNOWN),
        state_reason=state[1],
        persistent=persistent,
        autostart=autostart,
        memory=_bytes(memory),
        vcpus=int(root.findtext("vcpu", "1")),
        accelerator=root.get("type", ""),
        emulator=root.findtext("devices/emulator"),
        arch=kind.get("arch", "") if kind is not None else "",
        machine=kind.get("machine", "") if kind is not None else "",
        cpu_mode=cpu.get("mode", "custom") if cpu is not None else None,
        cpu_xml=ET.tostring(cpu, encoding="unicode") if cpu is not None else None,
        disks=tuple(_disk(disk) for disk in root.findall("devices/disk")),
        nics=tuple(_nic(nic) for nic in root.findall("devices/interface")),
        host_devices=_host_devices(devices) if devices is not None else (),
        boot_files=tuple(
            node.text
            for path in ("os/kernel", "os/initrd", "os/loader")
            for node in root.findall(path)
            if node.text
        ),
        kernel_arguments=root.findtext("os/cmdline", ""),
        shared_memory=_shared_memory(root),
        huge_pages=root.find("memoryBacking/hugepages") is not None,
        file_memory=root.find("memoryBacking/source[@type='file']") is not None,
        snapshots=snapshots,
        job=job,
        labels=_labels(root),
    )


def _labels(root: ET.Element) -> dict[str, str]:
    """Our labels from the metadata, which travel with the guest."""
    path = f"metadata/{{{LABELS}}}labels/{{{LABELS}}}label"
    return {node.get("name", ""): node.get("value", "") for node in root.findall(path)}


def labels_xml(labels: Mapping[str, str]) -> str:
    """The metadata element that holds labels."""
    root = ET.Element("labels")
    for name, value in sorted(labels.items()):
        ET.SubElement(root, "label", name=name, value=value)
    return ET.tostring(root, encoding="unicode")


def _bytes(node: ET.Element | None) -> Bytes:
    if node is None or not node.text:
        return Bytes(0)
    return Bytes(int(node.text) * _SCALE.get(node.get("unit", "KiB").lower(), 1 << 10))


def _disk(node: ET.Element) -> Disk:
    source, target, driver = node.find("source"), node.find("target"), node.find("driver")
    where = None
    if source is not None:
        where = next(
            (
                source.get(key)
                for key in ("file", "dev", "name", "volume", "dir")
                if source.get(key)
            ),
            None,
        )
    return Disk(
        target=target.get("dev", "?") if target is not None else "?",
        kind=node.get("type", "file"),
        source=where,
        cache=driver.get("cache") if driver is not None else None,
        read_only=node.find("readonly") is not None,
        shareable=node.find("shareable") is not None,
    )


def _nic(node: ET.Element) -> Nic:
    source = node.find("source")
    where = None
    if source is not None:
        # A card on a libvirt network names both; the network is what the target must have.
        where = source.get("network") or source.get("bridge") or source.get("dev")
    return Nic(kind=node.get("type", "?"), source=where)


def _host_devices(devices: ET.Element) -> tuple[str, ...]:
    found = []
    for node in devices.findall("hostdev"):
        address = node.find("source/address")
        where = " ".join(address.attrib.values()) if address is not None else ""
        found.append(f"{node.get('type', 'device')} {where}".strip())
    found += [
        f"network card {nic.find('mac').get('address', '')}"  # type: ignore[union-attr]
        for nic in devices.findall("interface[@type='hostdev']")
        if nic.find("mac") is not None
    ]
    found += [
        f"filesystem {fs.find('target').get('dir', '')}"  # type: ignore[union-attr]
        for fs in devices.findall("filesystem")
        if fs.find("target") is not None
    ]
    return tuple(found)


def _shared_memory(root: ET.Element) -> bool:
    access = root.find("memoryBacking/access")
    return access is not None and access.get("mode") == "shared"


def machines(capabilities: str) -> tuple[frozenset[str], frozenset[str]]:
    """Machine types and domain types ("kvm", "qemu") that a host's capabilities XML lists."""
    root = ET.fromstring(capabilities)
    types = {m.text for m in root.findall("guest/arch/machine") if m.text}
    types |= {m.text for m in root.findall("guest/arch/domain/machine") if m.text}
    accelerators = {d.get("type", "") for d in root.findall("guest/arch/domain")}
    return frozenset(types), frozenset(accelerators - {""})


def host_uuid(capabilities: str) -> str:
    """libvirt's UUID of the host."""
    return ET.fromstring(capabilities).findtext("host/uuid", "")


def version(number: int) -> str:
    """libvirt's packed version as people write it: 7002022 is "7.2.22"."""
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


Stats = Mapping[str, int | str | float | bool]


def _int(stats: Stats, key: str, default: int = 0) -> int:
    return int(stats.get(key, default))


def is_migration(stats: Stats) -> bool:
    """Whether a job that runs is a migration out of this host."""
    return (
        stats.get("operation") == libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT
        and stats.get("type") != libvirt.VIR_DOMAIN_JOB_NONE
    )


def job_sample(stats: Stats, *, at: Seconds, paused: bool, post_copy: bool) -> JobSample:
    """One `jobStats()` answer; QEMU's dirty rate arrives in pages per second."""
    page = _int(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_PAGE_SIZE, 4096) or 4096
    iteration = _int(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_ITERATION)
    pages = _int(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_DIRTY_RATE)
    downtime = _int(stats, libvirt.VIR_DOMAIN_JOB_DOWNTIME)
    bandwidth = _int(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_BPS)
    bandwidth += _int(stats, libvirt.VIR_DOMAIN_JOB_DISK_BPS)
    phase = JobPhase.PRE_COPY if iteration else JobPhase.SETUP
    if post_copy:
        phase = JobPhase.POST_COPY
    elif paused:
        phase = JobPhase.SWITCHOVER
    return JobSample(
        at=at,
        phase=phase,
        iteration=iteration,
        remaining=Bytes(_int(stats, libvirt.VIR_DOMAIN_JOB_DATA_REMAINING)),
        total=Bytes(_int(stats, libvirt.VIR_DOMAIN_JOB_DATA_TOTAL)),
        transferred=Bytes(_int(stats, libvirt.VIR_DOMAIN_JOB_DATA_PROCESSED)),
        bandwidth=BytesPerSecond(bandwidth),
        dirty_rate=BytesPerSecond(pages * page) if pages else None,
        expected_downtime=Seconds(downtime / 1000) if downtime else None,
        throttle=_int(stats, libvirt.VIR_DOMAIN_JOB_AUTO_CONVERGE_THROTTLE),
    )


def job_totals(stats: Stats) -> JobTotals:
    """The statistics of a completed job; libvirt counts in milliseconds."""
    downtime = stats.get(
        libvirt.VIR_DOMAIN_JOB_DOWNTIME_NET, stats.get(libvirt.VIR_DOMAIN_JOB_DOWNTIME)
    )
    setup = stats.get(libvirt.VIR_DOMAIN_JOB_SETUP_TIME)
    elapsed = stats.get(
        libvirt.VIR_DOMAIN_JOB_TIME_ELAPSED_NET, _int(stats, libvirt.VIR_DOMAIN_JOB_TIME_ELAPSED)
    )
    return JobTotals(
        total=Seconds(int(elapsed) / 1000),
        setup=None if setup is None else Seconds(int(setup) / 1000),
        downtime=None if downtime is None else Seconds(int(downtime) / 1000),
        iterations=_int(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_ITERATION),
        transferred=Bytes(_int(stats, libvirt.VIR_DOMAIN_JOB_DATA_PROCESSED)),
    )
