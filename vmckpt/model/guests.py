"""A guest: what libvirt calls a domain."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from vmckpt.units import Bytes

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
