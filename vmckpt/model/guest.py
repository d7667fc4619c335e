"""A guest (a libvirt domain): its definition, its state, and detection of two copies. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from vmckpt.errors import TwoCopies
from vmckpt.units import Bytes, Seconds


class GuestJob(StrEnum):
    """A job of libvirt on a guest. Messages and JSON contain the values."""

    START = "start"
    SAVE = "save"
    RESTORE = "restore"
    INCOMING = "incoming migration"
    OUTGOING = "outgoing migration"
    SNAPSHOT = "snapshot"
    REVERT = "revert to a snapshot"
    DUMP = "dump"
    BACKUP = "backup"


LOCKING = (
    GuestJob.OUTGOING, GuestJob.INCOMING, GuestJob.SAVE, GuestJob.SNAPSHOT, GuestJob.REVERT,
    GuestJob.DUMP,
)  # fmt: skip
"""Jobs during which libvirt blocks other changes to the guest; such changes fail after 30 s."""


class GuestState(StrEnum):
    """The state of a guest as libvirt reports it, or of a standby or its test copy."""

    RUNNING = "running"
    BLOCKED = "blocked"
    PAUSED = "paused"
    SHUTTING_DOWN = "shutting-down"
    SHUT_OFF = "shut-off"
    CRASHED = "crashed"
    SUSPENDED = "suspended"
    STANDBY = "standby"
    """A standby, ready to take over from a guest on another host. Not a guest itself."""
    TEST = "test"
    """A test copy of a standby, running or not. Not a guest itself."""
    UNKNOWN = "unknown"

    @property
    def runs(self) -> bool:
        """Whether the guest's CPUs are running."""
        return self in _RUNNING

    @property
    def is_active(self) -> bool:
        """Whether the guest is running, paused, suspended or shutting down.

        False for a crashed guest, a standby, a test copy and an unknown state, although these may
        have a QEMU process.
        """
        return self not in _INACTIVE

    @property
    def in_words(self) -> str:
        """The state as it follows "is" in a sentence."""
        return _IN_WORDS.get(self, self.value.replace("-", " "))


_IN_WORDS = {
    GuestState.STANDBY: "a standby",
    GuestState.TEST: "a test copy of a standby",
    GuestState.UNKNOWN: "in an unknown state",
}
_RUNNING = (GuestState.RUNNING, GuestState.BLOCKED)
_INACTIVE = (
    GuestState.SHUT_OFF, GuestState.CRASHED, GuestState.STANDBY, GuestState.TEST,
    GuestState.UNKNOWN,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One drive of a guest."""

    target: str
    """Name in the guest: "vda"."""
    kind: str
    """libvirt's source type: "file", "block", "network", "volume", …"""
    source: str | None
    """Path, device or name; None for an empty drive."""
    cache: str | None
    """The cache mode; None: QEMU's default, which is write-back."""
    read_only: bool
    shareable: bool
    below: tuple[str, ...] = ()
    """Backing files in the disk's chain, which QEMU only reads."""
    on_device: bool = False
    """The chain contains a device or volume, which cannot be compared between two hosts."""
    device: str = "disk"
    """"disk", "cdrom", "floppy" or "lun"."""
    optional: bool = False
    """libvirt drops a medium that is missing on the target (startupPolicy)."""
    data_file: str | None = None
    """External data file of a qcow2 image, which is part of the image; None: it has none."""

    @property
    def removable(self) -> bool:
        return self.device in ("cdrom", "floppy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network card."""

    kind: str
    """libvirt's interface type: "bridge", "network", "direct", "hostdev", …"""
    source: str | None
    """Bridge, network or device to which the card is connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason against every migration of a guest, whatever the target is."""

    code: str
    """Code of the finding."""
    what: str
    """The reason, as it continues after the guest's name: "has a transient disk: vda"."""
    hint: str
    by_qemu: bool = True
    """QEMU refuses, and reports this itself; otherwise only libvirt refuses. QEMU also refuses to
    save such a guest's state, as snapshots of memory and replication do."""


@dataclass(frozen=True, slots=True)
class GuestInterface:
    """A network interface as the guest agent reports it."""

    name: str
    """Name in the guest, such as "eth0"."""
    mac: str
    """In lower case; empty if the interface has no MAC address."""
    addresses: tuple[str, ...]
    """IP addresses with prefix lengths, without loopback and link-local addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A guest as libvirt describes it, with all facts that a migration needs."""

    name: str
    uuid: str
    state: GuestState
    persistent: bool
    autostart: bool
    memory: Bytes
    vcpus: int
    accelerator: str
    """Domain type: "kvm" or "qemu" (TCG)."""
    arch: str
    machine: str
    cpu_mode: str | None
    """The CPU mode in the definition; None: QEMU's default CPU."""
    cpu_xml: str | None
    disks: tuple[Disk, ...]
    nics: tuple[Nic, ...]
    host_devices: tuple[str, ...]
    """Short descriptions of host devices that are passed through to the guest."""
    boot_files: tuple[str, ...]
    """Kernel, initrd and firmware files that QEMU reads from the host."""
    kernel_arguments: str
    """Command line of the kernel that QEMU boots directly; empty if there is none."""
    shared_memory: bool
    huge_pages: bool
    file_memory: bool
    """The guest's memory is a file in the host's directory for memory files
    (memory_backing_dir)."""
    snapshots: int
    job: str | None
    """The libvirt job that is active on the guest; None if no job is active."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Labels that the operator has set in the guest's metadata; policies select guests by label."""
    saved: bool = False
    """The guest is shut off, and will resume from memory that libvirt saved (managed save)."""
    nvram: str | None = None
    """Path of the file with the firmware's variables; None if the guest has no such file."""
    tpm: bool = False
    """The guest has a TPM whose state is in files on its host."""
    directories: tuple[str, ...] = ()
    """Tags of the host's directories that are shared with the guest (<filesystem>)."""
    refusals: tuple[Refusal, ...] = ()
    """Devices and settings because of which libvirt or QEMU refuses every migration."""

    @property
    def leaves(self) -> bool:
        """Whether the guest is migrating to another host."""
        return self.job == GuestJob.OUTGOING

    @property
    def locked(self) -> bool:
        """Whether libvirt blocks changes to the guest until its job has ended."""
        return self.job in LOCKING


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """The state of a guest on one host, found by its UUID."""

    reachable: bool
    state: GuestState | None = None
    """The guest's state on the host; None: the host does not know the guest, or is unreachable."""
    migrating: bool = False
    """A migration job is, or may be, active on the guest there."""
    resumed: bool = False
    """The guest was paused for a switchover, then resumed because the migration failed."""
    held: bool = False
    """A migration has paused the guest, which is not handed over yet or has not fully arrived."""
    post_copy: bool = False
    """The guest is in post-copy: on the source, paused for good; on the target, running with only
    part of its memory."""

    @property
    def runs(self) -> bool:
        """Whether the guest's CPUs are running there."""
        return self.state is not None and self.state.runs

    @property
    def is_active(self) -> bool:
        """Whether the guest is active there; see `GuestState.is_active`."""
        return self.state is not None and self.state.is_active


MEND = "run vmckpt recover"
"""What to do about two copies. Only recovery proves that the two hosts are different hosts, so only
its error advises to destroy a copy."""


class RuntimeFacts(Protocol):
    """The facts about a guest on one host that `two_copies` needs."""

    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def state(self) -> GuestState: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A guest that is running on two hosts, or on one host while another host may run it.

    The other host holds the guest's lease, or its standby has taken over.
    """

    guest: str
    """The guest's name."""
    uuid: str
    hosts: tuple[str, ...]
    """Hosts that have, or may have, a copy."""
    why: str = field(default="", compare=False)
    """What the agents report; empty: the guest's CPUs are running on each of the hosts."""

    @property
    def text(self) -> str:
        """A description of the copies in one line."""
        where = " and ".join(self.hosts)
        if self.why:
            return f"{self.guest} may be running on {where}: {self.why}"
        return f"{self.guest} is running on {where}"

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "uuid": self.uuid, "hosts": list(self.hosts), "text": self.text,
        }  # fmt: skip


def two_copies(
    found: Iterable[tuple[str, RuntimeFacts]], told: Iterable[Copies] = ()
) -> tuple[Copies, ...]:
    """Return the guests that have two copies, one entry per guest.

    `found`: hosts with the guests that libvirt reports there; `told`: what agents report about
    protected guests (see protection.copies.of_protections).
    """
    hosts: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for host, guest in found:
        if guest.state.runs:
            hosts.setdefault(guest.uuid, []).append(host)
            names[guest.uuid] = guest.name
    copies = {
        uuid: Copies(guest=names[uuid], uuid=uuid, hosts=tuple(where))
        for uuid, where in hosts.items() if len(where) > 1
    }  # fmt: skip
    return merged(copies.values(), told)


def merged(*several: Iterable[Copies]) -> tuple[Copies, ...]:
    """Merge entries. Returns an entry for each guest, with all its hosts and the first reason."""
    known: dict[str, Copies] = {}
    for some in several:
        for one in some:
            old = known.get(one.uuid, one)
            hosts = tuple(dict.fromkeys((*old.hosts, *one.hosts)))
            known[one.uuid] = replace(old, hosts=hosts, why=old.why or one.why)
    return tuple(known.values())


def confirmed(
    copies: Sequence[Copies], since: Mapping[str, float], looked: Mapping[str, float]
) -> tuple[Copies, ...]:
    """Return `copies` without guests that may simply have moved between the queries of two hosts.

    `since`: when each guest (by UUID) was first seen with two copies; `looked`: when the last query
    of each host began. A guest is confirmed if all its hosts were queried again since it was first
    seen.
    """
    return tuple(
        one for one in copies
        if one.uuid in since and all(looked.get(host, 0.0) > since[one.uuid] for host in one.hosts)
    )  # fmt: skip


def error(copies: Sequence[Copies]) -> TwoCopies:
    """Return the error for these guests. Their hosts must be different hosts."""
    hint = f"{MEND}; destroy the copy that is not needed"
    return TwoCopies("; ".join(one.text for one in copies), hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNow:
    """The current state of one host."""

    name: str
    error: str | None = None
    """Why the host does not answer; None if it answers."""
    cpus: int = 0
    busy: float | None = None
    """CPU load since the previous poll, 0 to 1; None: not known yet."""
    memory: Bytes = Bytes(0)
    free: Bytes = Bytes(0)
    """Free memory, including caches that can be dropped."""
    closed: str | None = None
    """Why no guest is placed on the host, which is in maintenance; None: guests may be placed."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestNow:
    """The current state of one guest on one host. A migrating guest is on two hosts."""

    name: str
    uuid: str
    host: str
    state: GuestState
    memory: Bytes
    vcpus: int
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNow:
    """All hosts, and the guests of those that answer."""

    at: float
    """The time of this state, in seconds since 1970."""
    hosts: tuple[HostNow, ...] = ()
    guests: tuple[GuestNow, ...] = ()
    copies: tuple[Copies, ...] = ()
    """Guests that are running on two hosts, confirmed by repeated queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotNow:
    """One snapshot in a store."""

    id: str
    name: str
    store: str
    guest: str = ""
    guest_uuid: str = ""
    made_at: float = 0.0
    """When the snapshot was taken, in seconds since 1970."""
    memory: Bytes = Bytes(0)
    disks: Bytes = Bytes(0)
    new: Bytes = Bytes(0)
    """Bytes that the previous snapshot did not have."""
    parent: str | None = None
    group: str | None = None
    schedule: str | None = None
    pinned: bool = False
    verified: str = "never"
    """Result of the last verification, for display."""
    damaged: bool = False
    """Whether the last verification found damage."""
    verified_at: float | None = None
    wrong: str | None = None
    """Why the snapshot cannot be read or must not be trusted; None: no reason is known."""

    @property
    def good(self) -> bool:
        """Whether the snapshot is readable and no verification found damage, as far as known."""
        return self.wrong is None and not self.damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """One sample of a guest's activity. Its counters start when the guest starts."""

    at: Seconds
    state: GuestState | None
    """The guest's state; None: the guest is gone."""
    panicked: bool
    io_error: bool
    """The guest is paused because a disk cannot be read or written."""
    processors: int
    worked: Seconds
    """CPU time of all the guest's processors."""
    read: Bytes
    written: Bytes
    """Bytes written to the guest's disks."""
    dirtied: bool
    """QEMU's last dirty rate measurement found writes to memory."""
