"""Parse libvirt's XML and statistics, and convert their units. Pure.

Invalid input raises ValueError, or ParseError (a SyntaxError) if it is not XML; `connection` maps
both to HypervisorError.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from xml.etree import ElementTree as ET

import libvirt

from vmckpt.definition import needs, unmigratable
from vmckpt.errors import BadInput
from vmckpt.model.guest import Disk, Guest, GuestState, Nic
from vmckpt.model.migration import JobPhase, JobSample, JobTotals
from vmckpt.units import MEMORY_UNITS, Bytes, BytesPerSecond, Seconds


def path_of(root: ET.Element) -> str | None:
    """Return the path of a domain's NVRAM file, from either of libvirt's XML forms.

    Returns None if the domain has no file-backed NVRAM.
    """
    node = root.find("os/nvram")
    if node is None:
        return None
    source = node.find("source")
    path = (node.text or "").strip() or (source.get("file") if source is not None else None)
    return path if path and path.startswith("/") else None


LABELS = "urn:vmckpt:labels:1"
"""Namespace of the labels in a domain's metadata."""
STANDBY = "urn:vmckpt:standby:1"
"""Namespace of the mark in the metadata of a waiting standby."""
TEST = "urn:vmckpt:test:1"
"""Namespace of the mark in the metadata of a failover test's guest."""

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

# libvirt's limit for strings (VIR_NET_MESSAGE_STRING_MAX), and libxml2's limit for nesting.
_MOST_XML = 4 << 20
_DEEPEST = 256
_PIECE = 1 << 16
# Above any real value, and small enough for arithmetic, JSON and the journal.
_MOST = (1 << 63) - 1
UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Builder(ET.TreeBuilder):
    """A builder that rejects DTDs and deep nesting, which libvirt never writes.

    An attacker could use either to exhaust memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def doctype(self, _name: str, _public: str | None, _system: str | None) -> None:
        raise ValueError("XML with a DTD is refused")

    def start(self, tag: str, attrs: dict[str, str]) -> ET.Element:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"XML nested deeper than {_DEEPEST} is refused")
        return super().start(tag, attrs)

    def end(self, tag: str) -> ET.Element:
        self._depth -= 1
        return super().end(tag)


def tree(xml: str, *roots: str) -> ET.Element:
    """Parse a host's XML; its root element must be in `roots`. Raises ValueError, ParseError."""
    if not isinstance(xml, str) or len(xml) > _MOST_XML:
        raise ValueError(
            "not XML" if not isinstance(xml, str) else "XML larger than 4 MiB is refused"
        )
    parser = ET.XMLParser(target=_Builder())
    # The XML is fed in pieces, so that parsing stops at the first error.
    for begin in range(0, len(xml), _PIECE):
        parser.feed(xml[begin : begin + _PIECE])
    root: ET.Element = parser.close()
    if root.tag not in roots:
        raise ValueError(f"<{root.tag[:40]}> instead of <{roots[0]}>")
    return root


def count(value: Any, what: str) -> int:
    """Return a number after checking that it is from 0 to 2**63 - 1. Raises ValueError.

    `what`: name of the number in the error.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        raise ValueError(f"{what} is {str(value)[:40]!r}")
    return value


def free(memory: Mapping[str, int]) -> int:
    """Return a host's free memory, including caches that can be dropped, in the unit of `memory`.

    `memory`: libvirt's memory statistics of the host. Raises KeyError.
    """
    return memory["free"] + memory.get("buffers", 0) + memory.get("cached", 0)


def text(value: Any, what: str) -> str:
    """Return a string after checking that it is at most 4 MiB long. Raises ValueError.

    `what`: the name of the value, for the error.
    """
    if not isinstance(value, str) or len(value) > _MOST_XML:
        raise ValueError(f"{what} is {str(value)[:40]!r}")
    return value


def _number(text: str | None, what: str) -> int:
    """Parse a number from XML. See `count`. Raises ValueError."""
    if text is None or not re.fullmatch(r"\s*[0-9]{1,19}\s*", text):
        raise ValueError(f"{what} is {(text or '')[:40]!r}")
    return count(int(text), what)


def guest(
    xml: str,
    *,
    state: int,
    persistent: bool,
    autostart: bool,
    snapshots: int,
    job: str | None,
    saved: bool = False,
) -> Guest:
    """Build a Guest from its domain XML and other facts from libvirt.

    `xml`: the live XML if the guest is running. `state`: a virDomainState value. Raises ValueError.
    """
    root = tree(xml, "domain")
    devices = root.find("devices")
    memory = root.find("memory")
    kind = root.find("os/type")
    cpu = root.find("cpu")
    known = STATES.get(state, GuestState.UNKNOWN)
    if known is GuestState.PAUSED and standby_of(root) is not None:
        known = GuestState.STANDBY
    if known is not GuestState.SHUT_OFF and test_of(root) is not None:
        known = GuestState.TEST
    return Guest(
        name=root.findtext("name", ""),
        uuid=root.findtext("uuid", ""),
        state=known,
        persistent=persistent,
        autostart=autostart,
        memory=_bytes(memory),
        vcpus=_number(root.findtext("vcpu", "1"), "vcpu"),
        accelerator=root.get("type", ""),
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
        job=job or _block_job(root),
        labels=_labels(root),
        saved=saved,
        nvram=path_of(root),
        tpm=root.find("devices/tpm/backend[@type='emulator']") is not None,
        directories=tuple(
            node.get("dir", "") for node in root.findall("devices/filesystem/target")
        ),
        refusals=unmigratable.refusals(root),
    )


def standby_of(root: ET.Element) -> str | None:
    """Return the session that a standby belongs to; None if the domain is not a standby."""
    mark = root.find(f"metadata/{{{STANDBY}}}standby")
    return None if mark is None else mark.get("session")


def test_of(root: ET.Element) -> str | None:
    """Return the guest whose failover this domain tests; None if the domain is not a test."""
    mark = root.find(f"metadata/{{{TEST}}}test")
    return None if mark is None else mark.get("of")


def _block_job(root: ET.Element) -> str | None:
    """Return a description of a block job; None if there is none.

    libvirt neither reports block jobs as jobs nor migrates them.
    """
    for disk in root.findall("devices/disk"):
        target = disk.find("target")
        if disk.find("mirror") is not None and target is not None:
            return f"block job on {target.get('dev', '')}"
    return None


def _labels(root: ET.Element) -> dict[str, str]:
    """Return vmckpt's labels from the metadata, which moves with the guest."""
    path = f"metadata/{{{LABELS}}}labels/{{{LABELS}}}label"
    return {node.get("name", ""): node.get("value", "") for node in root.findall(path)}


def not_in_xml(text: str) -> bool:
    """Return whether a text contains characters that are not allowed in XML."""
    return _NOT_IN_XML.search(text) is not None


def labels_xml(labels: Mapping[str, str]) -> str:
    """Return the metadata element for labels. Raises BadInput for control characters."""
    root = ET.Element("labels")
    for name, value in sorted(labels.items()):
        if not_in_xml(name + value):
            raise BadInput(
                f"{name!r}={value!r}: a label must not contain control characters",
                hint="remove the control characters",
            )
        ET.SubElement(root, "label", name=name, value=value)
    return ET.tostring(root, encoding="unicode")


def _bytes(node: ET.Element | None) -> Bytes:
    if node is None or not node.text:
        return Bytes(0)
    unit = node.get("unit") or "KiB"
    if unit.lower() not in MEMORY_UNITS:
        raise ValueError(f"memory has the unknown unit {unit[:40]!r}")
    return Bytes(count(_number(node.text, "memory") * MEMORY_UNITS[unit.lower()], "memory"))


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
        below=tuple(
            file for backing in node.iter("backingStore")
            if (below := backing.find("source")) is not None and (file := below.get("file"))
        ),
        on_device=any(
            backing.get("type") not in (None, "file", "network")
            for backing in node.iter("backingStore")
        ),
        device=node.get("device", "disk"),
        optional=source is not None and source.get("startupPolicy") in needs.OPTIONAL,
        data_file=_data_file(source),
    )  # fmt: skip


def _data_file(source: ET.Element | None) -> str | None:
    data = None if source is None else source.find("dataStore/source")
    return None if data is None else data.get("file")


def _nic(node: ET.Element) -> Nic:
    source, kind = node.find("source"), node.get("type", "?")
    where = None
    if source is not None:
        # For a card on a libvirt network, the live XML has the type of the actual connection, and
        # also names the network. The target must have that network.
        where = source.get("network") or source.get("bridge") or source.get("dev")
        if source.get("network") and kind != "hostdev":
            kind = "network"
    return Nic(kind=kind, source=where)


def _host_devices(devices: ET.Element) -> tuple[str, ...]:
    """Return the host's devices that QEMU cannot migrate.

    USB devices, and PCI devices that QEMU unplugs for a migration (teaming), are left out: libvirt
    allows them.
    """
    found = []
    for node in devices.findall("hostdev"):
        if node.get("type") == "usb" or _unplugged(node):
            continue
        address = node.find("source/address")
        where = " ".join(address.attrib.values()) if address is not None else ""
        found.append(f"{node.get('type', 'device')} {where}".strip())
    for card in devices.findall("interface[@type='hostdev']"):
        mac = card.find("mac")
        if mac is not None and not _unplugged(card):
            found.append(f"network card {mac.get('address', '')}")
    return tuple(found)


def _unplugged(node: ET.Element) -> bool:
    teaming = node.find("teaming")
    return teaming is not None and teaming.get("type") == "transient"


def _shared_memory(root: ET.Element) -> bool:
    access = root.find("memoryBacking/access")
    return access is not None and access.get("mode") == "shared"


def machines(capabilities: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the machine types and domain types ("kvm", "qemu") of a host's capabilities XML.

    Raises ValueError if the XML is invalid.
    """
    root = tree(capabilities, "capabilities")
    types = {m.text for m in root.findall("guest/arch/machine") if m.text}
    types |= {m.text for m in root.findall("guest/arch/domain/machine") if m.text}
    accelerators = {d.get("type", "") for d in root.findall("guest/arch/domain")}
    return frozenset(types), frozenset(accelerators - {""})


def platforms(capabilities: str) -> dict[tuple[str, str], frozenset[str]]:
    """Return the machine types of a host, by architecture and domain type.

    `capabilities`: libvirt's capabilities XML. A domain type may have machine types of its own;
    otherwise it has those of the architecture. Raises ValueError if the XML is invalid.
    """
    found: dict[tuple[str, str], frozenset[str]] = {}
    for arch in tree(capabilities, "capabilities").findall("guest/arch"):
        common = {node.text for node in arch.findall("machine") if node.text}
        for domain in arch.findall("domain"):
            own = {node.text for node in domain.findall("machine") if node.text}
            key = arch.get("name", ""), domain.get("type", "")
            found[key] = found.get(key, frozenset()) | frozenset(own or common)
    return found


def host_uuid(capabilities: str) -> str:
    """Return the host's UUID from libvirt's capabilities XML; "" if the XML has none.

    Raises ValueError if the XML is invalid.
    """
    return tree(capabilities, "capabilities").findtext("host/uuid", "")


def version(number: int) -> str:
    """Convert libvirt's packed version to text: 7002022 is "7.2.22". Raises ValueError."""
    count(number, "version")
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


Stats = Mapping[str, int | str | float | bool]


def _int(stats: Stats, key: str) -> int:
    """Return a statistic; 0 if it is missing.

    Raises ValueError if the value is invalid: treating it as 0 could stop a migration.
    """
    return count(stats.get(key, 0), key)


def _hint(stats: Stats, key: str) -> int:
    """Return a statistic that is only informative; 0 if it is missing or invalid."""
    with suppress(ValueError):
        return count(stats.get(key, 0), key)
    return 0


def is_migration(stats: Stats) -> bool:
    """Return whether the statistics are those of a running migration away from this host."""
    return (
        stats.get("operation") == libvirt.VIR_DOMAIN_JOB_OPERATION_MIGRATION_OUT
        and stats.get("type") != libvirt.VIR_DOMAIN_JOB_NONE
    )


def job_sample(stats: Stats, *, at: Seconds, paused: bool, post_copy: bool) -> JobSample:
    """Convert one `jobStats()` answer. QEMU's dirty rate is in pages per second.

    `at`: when the answer was read; `paused`: the guest is paused for the switchover; `post_copy`:
    the migration is in post-copy. Raises ValueError.
    """
    page = _hint(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_PAGE_SIZE) or 4096
    iteration = _int(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_ITERATION)
    dirtied = page * _hint(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_DIRTY_RATE)
    downtime = _hint(stats, libvirt.VIR_DOMAIN_JOB_DOWNTIME)
    bandwidth = _hint(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_BPS)
    bandwidth += _hint(stats, libvirt.VIR_DOMAIN_JOB_DISK_BPS)
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
        bandwidth=BytesPerSecond(bandwidth if bandwidth <= _MOST else 0),
        dirty_rate=BytesPerSecond(dirtied) if 0 < dirtied <= _MOST else None,
        expected_downtime=Seconds(downtime / 1000) if downtime else None,
        throttle=min(100, _hint(stats, libvirt.VIR_DOMAIN_JOB_AUTO_CONVERGE_THROTTLE)),
    )


def job_totals(stats: Stats) -> JobTotals:
    """Convert the statistics of a completed job. libvirt's times are in milliseconds."""
    keys = (libvirt.VIR_DOMAIN_JOB_DOWNTIME_NET, libvirt.VIR_DOMAIN_JOB_DOWNTIME)
    setup, downtime = _time(stats, libvirt.VIR_DOMAIN_JOB_SETUP_TIME), _time(stats, *keys)
    elapsed = _time(
        stats, libvirt.VIR_DOMAIN_JOB_TIME_ELAPSED_NET, libvirt.VIR_DOMAIN_JOB_TIME_ELAPSED
    )
    return JobTotals(
        total=elapsed or Seconds(0.0),
        setup=setup,
        downtime=downtime,
        iterations=_hint(stats, libvirt.VIR_DOMAIN_JOB_MEMORY_ITERATION),
        transferred=Bytes(_hint(stats, libvirt.VIR_DOMAIN_JOB_DATA_PROCESSED)),
    )


def _time(stats: Stats, *keys: str) -> Seconds | None:
    """Return the first valid time among the statistics `keys`, which libvirt gives in milliseconds.

    None if none of them is present and valid.
    """
    for key in keys:
        with suppress(ValueError):
            return Seconds(count(stats.get(key), key) / 1000)
    return None


def base(disk: ET.Element) -> tuple[str, str] | None:
    """Return the path and format of the backing file of a disk; None: no file is known."""
    backing = disk.find("backingStore")
    if backing is None or backing.get("type", "file") != "file":
        return None
    source, kind = backing.find("source"), backing.find("format")
    path = None if source is None else source.get("file")
    return None if not path or kind is None else (path, kind.get("type", "raw"))


def another_image(source: ET.Element) -> bool:
    """Remove the security labels that prevent libvirt from changing the owner of a disk's image.

    The labels apply to the old image; libvirt must make QEMU the owner of the new image. Returns
    whether any label was removed.
    """
    kept = source.findall("seclabel[@model='dac'][@relabel='no']")
    for label in kept:
        source.remove(label)
    return bool(kept)
