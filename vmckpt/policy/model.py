"""A parsed and validated policy: migration, evacuation, protection and schedules. Pure data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from vmckpt.model.migration import AutoConverge, Compression, Mode
from vmckpt.policy.calendar import When
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class Strategy(StrEnum):
    """What is done with a guest when its host is evacuated."""

    MIGRATE = "migrate"
    SHUT_DOWN = "shutdown-and-return"
    """The guest is shut down, and started again when the host is back."""
    SUSPEND = "suspend-to-snapshot"
    """The guest's memory is saved on its host; the guest resumes there when the host is back."""
    LEAVE = "leave"
    """The guest stays on the host, which is then not empty."""

    @property
    def stops(self) -> bool:
        """Whether the guest is stopped until the host is back."""
        return self in (Strategy.SHUT_DOWN, Strategy.SUSPEND)


class Order(StrEnum):
    """Which guest moves first among guests of equal priority."""

    SMALLEST = "smallest-first"
    LONGEST = "longest-first"
    """The guest that takes longest, so that no long migration is left for the end."""
    NAME = "by-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """The section `evacuate`.

    A guest's own policy decides what is done with the guest; the policy of the evacuation decides
    how the host is emptied.
    """

    strategy: Strategy = Strategy.MIGRATE
    move_shut_off: bool = True
    """Whether a guest that is shut off is moved to another host."""
    priority: int = 0
    """Guests with a higher priority go first."""
    apart: tuple[str, ...] = ()
    """Labels; two guests with the same value for any of these labels may not share a host."""
    needs: tuple[tuple[str, str], ...] = ()
    """Labels that a host must have."""
    prefers: tuple[tuple[str, str], ...] = ()
    shutdown: Seconds = Seconds(120.0)
    """How long a guest may take to shut down, in seconds."""
    order: Order = Order.LONGEST
    per_source: int = 2
    per_target: int = 2
    at_once: int = 16
    keep_free: float = 0.1
    """Share of each target's memory to keep free, even while guests arrive."""
    cpu_overcommit: float = 16.0
    """Virtual CPUs allowed per CPU of a host. 16 is the default of OpenStack Nova."""
    spread: float = 1.0
    prefer: float = 1.0
    stay_near: float = 0.2
    displace: bool = False
    """Whether guests of other hosts may be moved to make room."""
    tries: int = 3
    """Attempts per guest, in total."""
    first_wait: Seconds = Seconds(10.0)
    """Pause after a guest's first failure; each further pause is twice as long. If the target
    failed, a retry on another host waits for less time."""


class Failover(StrEnum):
    """What decides that a guest's host is dead."""

    AUTOMATIC = "automatic"
    """With a lease store, the lease decides; the guest may be stopped if its host loses the lease.
    Without a lease store, the failure detector decides; it may power the host off."""
    MANUAL = "manual"
    """An operator decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The section `protect`."""

    interval: Seconds | None = None
    """Time between two epochs; None: computed from the cost of an epoch."""
    slowdown: float = 0.10
    """Without a fixed interval: the maximum share of time for which the guest may be paused."""
    max_pause: Seconds = Seconds(0.5)
    """Maximum pause per epoch. A guest that would be paused for longer is not protected."""
    hold: Seconds = Seconds(5.0)
    """Time from losing the backup until permission to run unprotected is requested.

    The output stays buffered until the permission is granted.
    """
    failover: Failover = Failover.MANUAL
    lease: Seconds = Seconds(5.0)
    """How long a renewal of the lease is valid. A restart of the database or of an agent within
    this time does no harm, but a failover takes that much longer. Without a lease store: how long
    a host must be silent before it is powered off."""

    def as_json(self) -> dict[str, Any]:
        """Return the section as JSON, with times in seconds."""
        return {**asdict(self), "failover": str(self.failover)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Read the JSON of `as_json`. Raises TypeError, ValueError or KeyError if it is invalid."""
        return cls(**{**told, "failover": Failover(told["failover"])})


FAILURE = Seconds(30 * 86400.0)
"""The default of `one_failure_in`: 30 days."""


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def period(time: Seconds) -> str:
    """Format a time as in schedules: "15min", "7d"."""
    for size, unit in _UNITS:
        if time >= size and time % size == 0:
            return f"{time / size:g}{unit}"
    return f"{time:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Retention: how many snapshots of each kind are kept; if all are 0, every snapshot is kept."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    @property
    def nothing_said(self) -> bool:
        """Whether there is no rule, so nothing may be deleted."""
        return all(getattr(self, one.name) <= 0 for one in fields(self))

    def __str__(self) -> str:
        said = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return ", ".join(f"{count} {name}" for name, count in said if count) or "all"


@dataclass(frozen=True, slots=True)
class Auto:
    """Due at an interval based on the cost of snapshots (Young, Daly); see snapshot.interval."""

    one_failure_in: Seconds = FAILURE
    """The assumed time between failures, until the journal has data."""


class Check(StrEnum):
    """How thoroughly a snapshot is verified."""

    SEALED = "sealed"
    """Every stored byte is verified, as far as possible without a private key."""
    DEEP = "deep"
    """Every chunk is also decrypted, and must be the expected chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How often, and how thoroughly, the snapshots of a schedule are verified."""

    every: Seconds
    depth: Check = Check.SEALED


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo:
    """Another store to which snapshots are copied, and its retention rules."""

    store: str
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When snapshots of a guest are taken, where they are stored, and which are kept."""

    name: str
    """The tag of the schedule's snapshots, by which they are pruned."""
    when: When | Auto
    text: str
    """`when` for display: "every 15min", "every auto", "daily 03:00"."""
    keep: Keep = field(default_factory=Keep)
    memory: bool = True
    group: bool = False
    """Whether all guests with this schedule are captured consistently, at the same instant."""
    store: str | None = None
    """The store for the snapshots; None: the first store in the inventory."""
    copies: tuple[CopyTo, ...] = ()
    verify: Proof | None = None


class Tls(StrEnum):
    """Whether the stream is encrypted."""

    REQUIRED = "required"
    PREFERRED = "preferred"
    """Encrypted if both hosts have certificates."""
    OFF = "off"


class CopyKind(StrEnum):
    """How disks that the hosts do not share are handled."""

    SHARED = "shared"
    """No disk is copied: all must be shared."""
    FULL = "full"
    """Disks are copied; every byte is written on the target."""
    THIN = "thin"
    """Disks are copied; areas that were never written take no space on the target either."""


class LeftBehind(StrEnum):
    """What is done with the images on the source once the guest is using their copies."""

    KEEP = "keep"
    REMOVE = "remove"
    """The images are removed, so that the guest can be migrated back later. Kept images would
    prevent this, because existing images are never overwritten."""


class OnFailure(StrEnum):
    """What is done after a failed migration, with the guest still on the source."""

    RETRY = "retry"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Which guests a policy applies to. All conditions must hold; no conditions: all guests."""

    guests: tuple[str, ...] = ()
    """Globs; at least one must match the guest's name."""
    guest_labels: tuple[tuple[str, str], ...] = ()
    host_labels: tuple[tuple[str, str], ...] = ()
    """Labels that the guest's host must have."""
    at_least: Bytes | None = None
    """Minimum memory of the guest."""
    below: Bytes | None = None
    by_name_only: bool = False
    """Whether the policy is used only if it is requested by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """Limits of a migration. None: no limit."""

    max_downtime: Seconds
    bandwidth: BytesPerSecond | None = None
    postcopy_bandwidth: BytesPerSecond | None = None
    time: Seconds | None = None
    time_per_gib: Seconds | None = None
    """Time limit per GiB of guest memory, counted as at least 1 GiB. The shorter of the resulting
    limit and `time` applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Attempts after the first, with growing pauses."""

    times: int = 0
    first_wait: Seconds = Seconds(10.0)
    factor: float = 2.0
    longest_wait: Seconds = Seconds(300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """When a pre-copy counts as stalled, and how long a switchover waits for a good moment."""

    window: Seconds = Seconds(10.0)
    """A pre-copy is stalled if the remaining memory has not reached a new low for this long."""
    margin: float = 0.04
    """A new low must be below the last low by at least this share."""
    smoothing: float = 0.4
    """Weight of the newest sample in the moving average of the bandwidth."""
    patience: Seconds = Seconds(10.0)
    """How long a rule with `stalled_for` delays a switch or pause, to wait for a pass that begins
    with about as little remaining memory as any earlier pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """Weights of the times whose sum decides when to switch to post-copy."""

    total_time: float = 1.0
    """Weight of the time until the migration ends."""
    postcopy_time: float = 0.5
    """Weight of the time in post-copy, when the guest depends on both hosts."""
    lost_work: float = 0.5
    """Weight of the time for which the guest waits for its memory, or is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCondition:
    """The conditions of a rule; all that are given must hold."""

    iteration: int | None = None
    """The current pass over memory has at least this number."""
    stalled_for: Seconds | None = None
    """The migration is stalled, and for this long no pass has begun with less remaining memory than
    the best earlier pass."""
    dirty_over_bandwidth: float | None = None
    """At least this share of what the last pass sent is dirty again; at 1, pre-copy never ends."""
    precopy_excess: float | None = None
    """Compared with a switch to post-copy now, pre-copy would send at least this much more, as a
    share of what the first pass sent."""
    lowest_cost: SwitchCost | None = None
    """No later switch to post-copy would cost less than a switch now, nor would pre-copy alone."""
    expected_downtime_above: Seconds | None = None
    expected_downtime_below: Seconds | None = None
    time_used: Seconds | None = None
    time_share: float | None = None
    """At least this share of the time limit has been used."""
    remaining_above: Bytes | None = None
    remaining_below: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseDowntime:
    """Allow a longer downtime: by `by`, once per pass, up to `to`."""

    by: Seconds
    to: Seconds


@dataclass(frozen=True, slots=True)
class Throttle:
    """Let QEMU slow the guest down from now on."""

    how: AutoConverge


@dataclass(frozen=True, slots=True)
class Compress:
    """From now on, send only differences from previously sent pages (xbzrle); `cache` in bytes."""

    cache: Bytes


@dataclass(frozen=True, slots=True)
class StartPostcopy:
    """Run the guest on the target now; the rest of its memory follows."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause the guest until it runs on the target."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Cancel the migration; the guest stays where it is."""


Do = RaiseDowntime | Throttle | Compress | StartPostcopy | Pause | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of `converge.rules`."""

    name: str
    """The rule's name; "rule 2" and the like if the file does not name the rule."""
    when: RuleCondition
    do: Do


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How memory is transferred."""

    tls: Tls = Tls.PREFERRED
    connections: int = 1
    zero_copy: bool = False
    compression: Compression = Compression.NONE
    compression_level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How the guest's disks are handled."""

    copy: CopyKind = CopyKind.SHARED
    disks: tuple[str, ...] = ()
    """Disks to copy ("vda"); empty: all disks that are not shared."""
    pool: str | None = None
    """A directory on the target, or the name of a libvirt pool; None: the same path."""
    left_behind: LeftBehind = LeftBehind.KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How guests are migrated, protected, evacuated and snapshotted."""

    name: str
    file: str
    """The file that the policy was read from, for messages."""
    description: str = ""
    select: Select = field(default_factory=Select)
    mode: Mode = Mode.AUTO
    limits: MoveLimits
    retries: Retries = field(default_factory=Retries)
    stall: Stall = field(default_factory=Stall)
    rules: tuple[Rule, ...] = ()
    transport: Transport = field(default_factory=Transport)
    storage: Storage = field(default_factory=Storage)
    on_failure: OnFailure = OnFailure.STOP
    recover_for: Seconds = Seconds(600.0)
    """How long to try to resume a broken post-copy automatically before asking the operator."""
    probe: Seconds = Seconds(1.0)
    """How long the guest's dirty rate is measured before the migration; 0: not measured."""
    protection: Protection = field(default_factory=Protection)
    evacuation: Evacuation = field(default_factory=Evacuation)
    snapshots: tuple[Schedule, ...] = ()
    """Snapshots that `vmckpt run` takes."""
    shipped: bool = False
    """Whether the policy is shipped with vmckpt; the operator's own policies take precedence."""
    given: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    """Keys that the file sets, such as "limits.time" and "converge.rules.0", with their lines."""

    @property
    def may_switch_early(self) -> bool:
        """Whether a migration under this policy may use post-copy."""
        return self.mode in (Mode.POSTCOPY, Mode.HYBRID, Mode.AUTO) and (
            self.mode is Mode.POSTCOPY
            or any(isinstance(rule.do, StartPostcopy) for rule in self.rules)
        )
