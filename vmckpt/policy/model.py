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
    """Its memory is saved on its host, and the guest resumes there when the host is back."""
    LEAVE = "leave"
    """The guest stays on the host, which is then not empty."""

    @property
    def stops(self) -> bool:
        """Whether the guest does not run until the host is back."""
        return self in (Strategy.SHUT_DOWN, Strategy.SUSPEND)


class Order(StrEnum):
    """Which guest goes first among those of equal priority."""

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
    """Whether a guest that is shut off is defined on another host."""
    priority: int = 0
    """Guests with a higher priority go first."""
    apart: tuple[str, ...] = ()
    """Labels; two guests with the same value of such a label may not share a host."""
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
    """Share of each target's memory to keep free, also while guests arrive."""
    cpu_overcommit: float = 16.0
    """Guest CPUs allowed for each CPU of a host. 16 is the default of OpenStack Nova."""
    spread: float = 1.0
    prefer: float = 1.0
    stay_near: float = 0.2
    displace: bool = False
    """Whether guests of other hosts may be moved to make room."""
    tries: int = 3
    """Attempts for each guest, in total."""
    first_wait: Seconds = Seconds(10.0)
    """Pause after a guest's first failure; each further pause is twice as long."""


class Failover(StrEnum):
    """What decides that a guest's host is dead."""

    AUTOMATIC = "automatic"
    """With a lease store, the lease; the guest may be stopped if its host loses the lease. Without
    a lease store, the failure detector of a service, which may power the host off."""
    MANUAL = "manual"
    """An operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The section `protect`."""

    interval: Seconds | None = None
    """Time between two epochs; None: chosen by what an epoch costs."""
    slowdown: float = 0.10
    """For a chosen interval: the largest share of the guest's time that pauses may take."""
    max_pause: Seconds = Seconds(0.5)
    """A guest that would be paused for longer is not protected."""
    hold: Seconds = Seconds(5.0)
    """How long buffered output waits for a backup that is gone."""
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
        """Read the JSON of `as_json`. Raises TypeError or ValueError if it is invalid."""
        return cls(**{**told, "failover": Failover(told["failover"])})


FAILURE = Seconds(30 * 86400.0)
"""The default of `one_failure_in`: 30 days."""


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def period(time: Seconds) -> str:
    """Return a time as schedules write it: "15min", "7d"."""
    for size, unit in _UNITS:
        if time >= size and time % size == 0:
            return f"{time / size:g}{unit}"
    return f"{time:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Retention: how many snapshots of each kind are kept; all 0: every snapshot is kept."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    @property
    def nothing_said(self) -> bool:
        """Whether there is no rule, so that nothing may be deleted."""
        return all(getattr(self, one.name) <= 0 for one in fields(self))

    def __str__(self) -> str:
        said = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return ", ".join(f"{count} {name}" for name, count in said if count) or "all"


@dataclass(frozen=True, slots=True)
class Auto:
    """As often as is worth its cost, by the formula of Young and Daly; see snapshot.interval."""

    one_failure_in: Seconds = FAILURE
    """The time between failures that is assumed before the journal has data."""


class Check(StrEnum):
    """How thoroughly a snapshot is verified."""

    SEALED = "sealed"
    """Every stored bit, as far as possible without a private key."""
    DEEP = "deep"
    """Every chunk is opened as well, and must belong to its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How often, and how thoroughly, the snapshots of a schedule are verified."""

    every: Seconds
    depth: Check = Check.SEALED


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo:
    """Another store that snapshots are copied to, and what is kept there."""

    store: str
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When snapshots of a guest are taken, where they are stored, and which are kept."""

    name: str
    """The tag of its snapshots, by which they are pruned."""
    when: When | Auto
    text: str
    """`when` as it was written: "every 15m", "daily 03:00"."""
    keep: Keep = field(default_factory=Keep)
    memory: bool = True
    group: bool = False
    """Whether all guests with this schedule are captured at one instant, consistently."""
    store: str | None = None
    """The store to take snapshots into; None: the first store of the inventory."""
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
    """Copied; every byte is written on the target."""
    THIN = "thin"
    """Copied; areas that were never written take no space on the target either."""


class LeftBehind(StrEnum):
    """What is done with the images on the source once the guest runs on their copies."""

    KEEP = "keep"
    REMOVE = "remove"
    """Allows migrating back later, since existing images are never overwritten."""


class OnFailure(StrEnum):
    """What is done after a migration failed and the guest runs on the source."""

    RETRY = "retry"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Which guests a policy is for. All given conditions must hold; without any: all guests."""

    guests: tuple[str, ...] = ()
    """Globs, one of which must match the guest's name."""
    guest_labels: tuple[tuple[str, str], ...] = ()
    host_labels: tuple[tuple[str, str], ...] = ()
    """Labels of the host the guest is on."""
    at_least: Bytes | None = None
    """Memory of the guest."""
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
    """Time limit for each GiB of the guest's memory; the shorter of this and `time` applies."""


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
    """Stalled: the remaining memory reached no new low for this long."""
    margin: float = 0.04
    """A new low must be lower by at least this share."""
    smoothing: float = 0.4
    """Weight of the newest bandwidth in the moving average."""
    patience: Seconds = Seconds(10.0)
    """How long a switchover waits for a local minimum of the remaining memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCondition:
    """The conditions of a rule; all that are given must hold."""

    iteration: int | None = None
    """In this pass over memory or a later one."""
    stalled_for: Seconds | None = None
    """Stalled, and for this long no pass began with less than the best pass before."""
    dirty_over_bandwidth: float | None = None
    """The last pass left at least this share of what it sent dirty again; at 1, pre-copy never
    ends."""
    precopy_excess: float | None = None
    """Finishing by pre-copy would send more than a switch to post-copy now, by at least this share
    of the guest's memory."""
    expected_downtime_above: Seconds | None = None
    expected_downtime_below: Seconds | None = None
    time_used: Seconds | None = None
    time_share: float | None = None
    """At least this share of the time limit is used."""
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
    """Send differences to pages sent before (xbzrle) from now on, with a cache of this size."""

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
    """The rule's name, or "rule 2" and the like if the file gives none."""
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
    """Disks to copy ("vda"); empty: all that are not shared."""
    pool: str | None = None
    """A folder on the target, or a libvirt pool's name; None: the same path."""
    left_behind: LeftBehind = LeftBehind.KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How guests are migrated, protected, evacuated and snapshotted."""

    name: str
    file: str
    """The file it was read from, for messages."""
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
    """For how long a broken post-copy is resumed automatically before the operator is asked."""
    probe: Seconds = Seconds(1.0)
    """How long the guest's dirty rate is measured before the migration; 0: not measured."""
    protection: Protection = field(default_factory=Protection)
    evacuation: Evacuation = field(default_factory=Evacuation)
    snapshots: tuple[Schedule, ...] = ()
    """Snapshots that `vmckpt run` takes."""
    shipped: bool = False
    """Whether it is shipped with vmckpt; the operator's own policies take precedence."""
    given: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    """Keys that the file sets, such as "limits.time" and "converge.rules.0", with their lines."""

    @property
    def may_switch_early(self) -> bool:
        """Whether a migration under this policy may use post-copy."""
        return self.mode in (Mode.POSTCOPY, Mode.HYBRID, Mode.AUTO) and (
            self.mode is Mode.POSTCOPY
            or any(isinstance(rule.do, StartPostcopy) for rule in self.rules)
        )
