"""The results of the Python API. Pure data.

Times and durations are in seconds, sizes in bytes. A field is None if its value is unknown or does
not exist. `details` is the object that the command prints with `--json`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of the inventory."""

    name: str
    uri: str
    labels: Mapping[str, str]
    error: str | None
    """Why the host's libvirt does not answer; None: it answers, and the fields below are known."""
    libvirt: str | None
    """Version of libvirt, such as "9.0.0"."""
    qemu: str | None
    cpus: int | None
    memory: int | None
    memory_free: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A guest and its host."""

    name: str
    uuid: str
    host: str
    state: str
    """"running", "paused", "shut-off", …"""
    memory: int
    vcpus: int
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of a check."""

    code: str
    """Stable name of the check."""
    severity: str
    """"ok", "warning", or "blocker", which forbids the operation."""
    where: str
    """The host or guest that the finding is about."""
    text: str
    hint: str | None
    """What to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range of a forecast."""

    low: float
    high: float | None
    """None: no upper bound is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is expected of a migration in one mode."""

    mode: str
    total: Range | None
    """Duration; None: the migration never ends."""
    downtime: Range | None
    sent: Range | None
    """Bytes that are sent."""
    converges: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a migration would do."""

    guest: str
    source: str
    target: str
    possible: bool
    """Whether there is no blocker."""
    policy: str | None
    mode: str
    reason: str
    """Why this mode was chosen."""
    findings: tuple[Finding, ...]
    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A migration that has completed."""

    guest: str
    source: str
    target: str
    job: str | None
    policy: str | None
    mode: str | None
    took: float
    downtime: float | None
    sent: int
    warnings: tuple[str, ...]
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMove:
    """A move in the plan of an evacuation."""

    guest: str
    source: str
    target: str
    why: str
    total: Range | None
    downtime: Range | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remaining:
    """A guest that was not or cannot be moved."""

    guest: str
    why: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvacuationPlan:
    """What an evacuation would do."""

    host: str
    moves: tuple[PlannedMove, ...]
    remaining: tuple[Remaining, ...]
    """Guests that cannot be moved."""
    shut_down: tuple[str, ...]
    """Guests that would be shut down, because their policy requires it."""
    suspended: tuple[str, ...]
    """Guests that would be suspended to disk, because their policy requires it."""
    total: Range
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A guest that was moved."""

    guest: str
    source: str
    target: str
    job: str | None
    took: float
    downtime: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """An evacuation that has ended; the host is in maintenance."""

    host: str
    job: str | None
    moves: tuple[Move, ...]
    remaining: tuple[Remaining, ...]
    """Guests that are still on the host. If there are none, the host can be switched off."""
    unprotected: tuple[str, ...]
    """Guests of other hosts that have lost their standby on this host."""
    took: float
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A snapshot in a store."""

    id: str
    name: str | None
    guest: str | None
    guest_uuid: str | None
    host: str | None
    """The host on which the guest was running."""
    made_at: float | None
    """When the guest was paused, in seconds since 1970."""
    memory: bool | None
    """Whether the snapshot contains memory."""
    encrypted: bool | None
    pinned: bool
    trusted: bool
    """Whether a writer that this machine trusts has signed the snapshot."""
    intact: bool | None
    """The result of the last verification."""
    error: str | None
    """Why the snapshot cannot be read; None: it can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedSnapshot:
    """A snapshot that was created."""

    id: str
    name: str
    guest: str
    host: str
    store: str
    job: str | None
    paused_for: float
    took: float
    written: int
    """Bytes that were added to the store."""
    encrypted: bool
    warnings: tuple[str, ...]
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A guest that was restored."""

    snapshot: str
    guest: str
    host: str
    job: str | None
    started: bool
    """Whether the guest was started. A snapshot without memory leaves it off."""
    took: float
    warnings: tuple[str, ...]
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """A protection that was started; the standby is ready."""

    guest: str
    primary: str
    backup: str
    job: str | None
    automatic: bool
    """Whether the standby takes over without an operator."""
    took: float
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The status of a protection."""

    guest: str
    uuid: str
    primary: str
    backup: str
    job: str
    phase: str
    ready: bool
    """Whether the standby can take over."""
    why: str
    """Why the standby can or cannot take over."""
    behind: float | None
    """What would be lost if the primary died now, in seconds of the guest's run (RPO)."""
    automatic: bool
    ended: str | None
    """What happened, if the protection has ended; None: it is active."""
    next_step: str | None
    """What the operator must do; None: nothing."""
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a protection, by a failover or by `unprotect`."""

    guest: str
    host: str
    """The host on which the guest is running."""
    why: str
    took: float
