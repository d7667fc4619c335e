"""A guest (libvirt: a domain): what it is, how it stands, whether it has two copies. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from vmckpt.errors import TwoCopies
from vmckpt.units import Bytes, Seconds

OUTGOING = "outgoing migration"
"""The job of a guest that leaves."""
LOCKING = (OUTGOING, "incoming migration", "save", "snapshot", "revert to a snapshot", "dump")
"""Jobs that keep every other change of the guest waiting; libvirt gives up on those after 30 s."""


class GuestState(StrEnum):
    """What a guest does, in libvirt's words."""

    RUNNING = "running"
    BLOCKED = "blocked"
    PAUSED = "paused"
    SHUTTING_DOWN = "shutting-down"
    SHUT_OFF = "shut-off"
    CRASHED = "crashed"
    SUSPENDED = "suspended"
    STANDBY = "standby"
    """It waits to become a protected guest, which runs elsewhere: no guest itself."""
    TEST = "test"
    """A copy of a standby, which runs beside it for a test: no guest itself, whatever it does."""
    UNKNOWN = "unknown"

    @property
    def runs(self) -> bool:
        """Whether the guest's CPUs run."""
        return self in _RUNNING

    @property
    def is_active(self) -> bool:
        """Whether a QEMU process of the guest exists."""
        return self not in _INACTIVE


_RUNNING = (GuestState.RUNNING, GuestState.BLOCKED)
_INACTIVE = (
    GuestState.SHUT_OFF, GuestState.CRASHED, GuestState.STANDBY, GuestState.TEST,
    GuestState.UNKNOWN,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One drive."""

    target: str
    """Its name in the guest: "vda"."""
    kind: str
    """libvirt's source type: "file", "block", "network", "volume", …"""
    source: str | None
    """Path, device or name; None for an empty drive."""
    cache: str | None
    """None: the default of QEMU, which is write-back."""
    read_only: bool
    shareable: bool
    below: tuple[str, ...] = ()
    """Files of its backing chain, which are read."""
    on_device: bool = False
    """In that there is something else, of which nobody can see whether two hosts have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One network card."""

    kind: str
    """libvirt's interface type: "bridge", "network", "direct", "hostdev", …"""
    source: str | None
    """Bridge, network or device it is plugged into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """What a migration must know of a guest."""

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
    """None: QEMU's default CPU."""
    cpu_xml: str | None
    disks: tuple[Disk, ...]
    nics: tuple[Nic, ...]
    host_devices: tuple[str, ...]
    """Devices of the host handed to the guest, described in a word or two each."""
    boot_files: tuple[str, ...]
    """Kernel, initrd and firmware that QEMU reads from the host."""
    kernel_arguments: str
    """Command line of a kernel that QEMU boots directly; empty if it boots none."""
    shared_memory: bool
    huge_pages: bool
    file_memory: bool
    """Its memory is a file, in the folder that the host's libvirt has for such files."""
    snapshots: int
    job: str | None
    """The job that holds the guest; None if none does."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What the operator wrote into its metadata, to choose policies by."""
    saved: bool = False
    """It is off, and goes on from memory that its host's libvirt keeps (managed save)."""
    nvram: str | None = None
    """The file of its firmware's variables."""
    tpm: bool = False
    """It has a TPM whose state is in files of its host."""

    @property
    def leaves(self) -> bool:
        """Whether it is on its way to another host."""
        return self.job == OUTGOING

    @property
    def locked(self) -> bool:
        """Whether libvirt lets nobody change it until its job has ended."""
        return self.job in LOCKING


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What one host says about a guest, asked by UUID."""

    reachable: bool
    state: GuestState | None = None
    """None: the host does not know the guest, or is not reachable."""
    migrating: bool = False
    """A migration job holds the guest there."""
    resumed: bool = False
    """Its CPUs were stopped for a switchover and started again, because the migration failed."""
    held: bool = False
    """Its CPUs stand still for a migration: not handed over yet, or not arrived in whole."""
    post_copy: bool = False
    """It is in two parts: paused on the source for good, or running here on part of its memory."""

    @property
    def runs(self) -> bool:
        """Whether its CPUs run there."""
        return self.state is not None and self.state.runs


MEND = "run vmckpt recover; end the copy that is not needed"


class RuntimeFacts(Protocol):
    """A guest as libvirt shows it on one host."""

    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def state(self) -> GuestState: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """A guest that runs on two hosts, or on one while another holds its lease."""

    guest: str
    """Its name."""
    uuid: str
    hosts: tuple[str, ...]
    """Where a copy is, or may be."""
    why: str = field(default="", compare=False)
    """What the agents say; empty: its CPUs run on each of the hosts."""

    @property
    def text(self) -> str:
        """In one line."""
        told = f": {self.why}" if self.why else ""
        return f"{self.guest} runs on {' and '.join(self.hosts)}{told}"

    def as_json(self) -> dict[str, Any]:
        return {
            "guest": self.guest, "uuid": self.uuid, "hosts": list(self.hosts), "text": self.text,
        }  # fmt: skip


def two_copies(
    found: Iterable[tuple[str, RuntimeFacts]], told: Iterable[Copies] = ()
) -> tuple[Copies, ...]:
    """Decide which guests have two copies; one entry per guest.

    `found`: hosts with the guests that libvirt shows there; `told`: what agents say of protected
    guests (see protection.copies.of_protections).
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
    """One entry per guest, with all its hosts and the first reason."""
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
    """Leave out what a guest may be that moved between two looks at its hosts.

    `since`: when each guest (its UUID) was first seen so; `looked`: when each host was asked last.
    A guest that was seen to run on both before, and is seen so by looks that began since, does.
    """
    return tuple(
        one for one in copies
        if one.uuid in since and all(looked.get(host, 0.0) > since[one.uuid] for host in one.hosts)
    )  # fmt: skip


def error(copies: Sequence[Copies]) -> TwoCopies:
    """The error that a command ends with."""
    return TwoCopies("; ".join(one.text for one in copies), hint=MEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNow:
    """One host."""

    name: str
    error: str | None = None
    """Why it says nothing; None: it answers."""
    cpus: int = 0
    busy: float | None = None
    """Share of its CPUs that worked since the look before; None: not known yet."""
    memory: Bytes = Bytes(0)
    free: Bytes = Bytes(0)
    """Free, or held by caches that can be dropped."""
    closed: str | None = None
    """Why nothing is placed there: it is in maintenance."""
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestNow:
    """One guest, on one host; on its way it is on two."""

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
    """Seconds since 1970."""
    hosts: tuple[HostNow, ...] = ()
    guests: tuple[GuestNow, ...] = ()
    copies: tuple[Copies, ...] = ()
    """Guests whose CPUs run on two hosts, by more than one look at them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotNow:
    """One snapshot in a store."""

    id: str
    name: str
    store: str
    guest: str = ""
    guest_uuid: str = ""
    made_at: float = 0.0
    """Seconds since 1970."""
    memory: Bytes = Bytes(0)
    disks: Bytes = Bytes(0)
    new: Bytes = Bytes(0)
    """What the one before did not have."""
    parent: str | None = None
    group: str | None = None
    schedule: str | None = None
    pinned: bool = False
    verified: str = "never"
    """What the last check found."""
    verified_at: float | None = None
    wrong: str | None = None
    """Why it cannot be read or is not to be trusted."""

    @property
    def good(self) -> bool:
        """For all that is known: it can be read, and no check found it damaged."""
        return self.wrong is None and not self.verified.startswith("bad")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """One look at a guest; times and bytes count from its start."""

    at: Seconds
    state: GuestState | None
    """None: it is gone."""
    panicked: bool
    io_error: bool
    """It was stopped because a disk cannot be read or written."""
    processors: int
    worked: Seconds
    """Time that its processors ran, all together."""
    read: Bytes
    written: Bytes
    """Of its disks."""
    dirtied: bool
    """QEMU saw it write into memory since its last measurement."""
