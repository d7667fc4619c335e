"""A running migration as its statistics tell it, and what is decided about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from vmckpt.units import Bytes, BytesPerSecond, Seconds


class JobPhase(StrEnum):
    """How far a migration is."""

    PREFLIGHT = "preflight"
    SETUP = "setup"
    PRE_COPY = "pre-copy"
    POST_COPY = "post-copy"
    POST_COPY_PAUSED = "postcopy-paused"
    """The stream broke: the guest waits on the target for pages that the source holds."""
    PAUSED = "paused"
    """The policy stopped the guest so that its memory can be sent to the end."""
    SWITCHOVER = "switchover"
    CLEANUP = "cleanup"
    CANCELLING = "cancelling"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSample:
    """One reading of a running migration job."""

    at: Seconds
    """Monotonic time of the reading."""
    phase: JobPhase
    iteration: int
    """Pass over memory, from 1; 0 before the first."""
    remaining: Bytes
    """Memory and disk that is still to be sent, as known now."""
    total: Bytes
    transferred: Bytes
    """Sent so far, resent pages included: it can exceed `total`."""
    bandwidth: BytesPerSecond
    dirty_rate: BytesPerSecond | None
    """None until QEMU has measured one: after the first pass, and one second at the least."""
    expected_downtime: Seconds | None
    """QEMU's own guess; None until it has made one."""
    throttle: int
    """Per cent of CPU time taken from the guest by auto-converge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """The statistics of a completed migration."""

    total: Seconds
    setup: Seconds | None
    downtime: Seconds | None
    """As QEMU measured it, transfer of control included. It compares the clocks of two hosts."""
    iterations: int
    transferred: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Something that was decided, with the numbers it was made from."""

    at: Seconds
    """Monotonic time."""
    action: str
    reason: str
    rule: str = ""
    """What asked for it: a rule of the policy by its name, "operator", "time limit", …"""
    acted: bool = True
    """False: it was only decided, to see what would be done."""
    numbers: Mapping[str, float | int | str | None] = field(
        default_factory=lambda: MappingProxyType({})
    )


class Outcome(StrEnum):
    """How a migration ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed-out"
    NOT_CONVERGED = "not-converged"
    """The policy gave up: the guest writes faster than its memory can be sent."""
    FAILED = "failed"
    SHUT_OFF = "shut-off"
    """The guest runs on neither host: it ended meanwhile."""
    POST_COPY_PAUSED = "postcopy-paused"
    """The stream of a post-copy broke and was not mended; nothing is lost, nothing was ended."""
    LOST = "lost"
    """The target lost the guest in the middle of a post-copy: part of its memory is gone."""
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    PLANNED = "planned"
    """Preflight passed and nothing more was asked for."""
