"""How hosts, guests and snapshots stand, as one who looks on wants to know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vmckpt.model.copies import Copies
from vmckpt.model.guests import GuestState
from vmckpt.units import Bytes, Seconds


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
