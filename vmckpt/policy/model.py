"""A policy, parsed and validated: migration, evacuation, protection and schedules. Pure data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Self

from vmckpt.model.migration import AutoConverge, Compression, Mode
from vmckpt.policy.calendar import When
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class Strategy(StrEnum):
    """What becomes of a guest whose host is emptied."""

    MIGRATE = "migrate"
    SHUT_DOWN = "shutdown-and-return"
    """It is shut down, and started again when the host is back."""
    SUSPEND = "suspend-to-snapshot"
    """Its memory is saved on its host, and it goes on there when the host is back."""
    LEAVE = "leave"
    """It stays where it is, and the host is not empty then."""

    @property
    def stops(self) -> bool:
        """The guest does not run meanwhile."""
        return self in (Strategy.SHUT_DOWN, Strategy.SUSPEND)


class Order(StrEnum):
    """Who goes first among those of one priority."""

    SMALLEST = "smallest-first"
    LONGEST = "longest-first"
    """What takes longest: nothing long is left for the end."""
    NAME = "by-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """The section `evacuate`. A guest's own policy says what becomes of it; the policy that a host
    is emptied by says how."""

    strategy: Strategy = Strategy.MIGRATE
    move_shut_off: bool = True
    """A guest that is off is defined on another host."""
    priority: int = 0
    """Higher ones go first."""
    apart: tuple[str, ...] = ()
    """Labels: no two guests that have the same value of one of them may be on one host."""
    needs: tuple[tuple[str, str], ...] = ()
    """Labels that a host must have."""
    prefers: tuple[tuple[str, str], ...] = ()
    shutdown: Seconds = Seconds(120.0)
    """How long a guest may take to shut down."""
    order: Order = Order.LONGEST
    per_source: int = 2
    per_target: int = 2
    at_once: int = 16
    keep_free: float = 0.1
    """Of each target's memory, also while guests are on their way."""
    cpu_overcommit: float = 16.0
    """CPUs that guests may have for each of the host's. 16: what OpenStack Nova has as default."""
    spread: float = 1.0
    prefer: float = 1.0
    stay_near: float = 0.2
    displace: bool = False
    """Guests of other hosts may be moved to make room."""
    tries: int = 3
    """For each guest, in all."""
    first_wait: Seconds = Seconds(10.0)
    """After a guest's first failure; twice as long after each that follows."""


class Failover(StrEnum):
    """Who decides that a guest's host is dead."""

    AUTOMATIC = "automatic"
    """The lease; the leave to stop a guest whose host has lost it. Without a lease store whoever
    keeps watch; the leave to power that host off."""
    MANUAL = "manual"
    """A person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The section `protect`."""

    interval: Seconds | None = None
    """Between two epochs; None: chosen by what an epoch costs."""
    slowdown: float = 0.10
    """For a chosen interval: most of the guest's time that pauses may take."""
    max_pause: Seconds = Seconds(0.5)
    """A guest that would have to stand still for longer is not protected."""
    hold: Seconds = Seconds(5.0)
    """For so long output waits for a backup that is gone."""
    failover: Failover = Failover.MANUAL
    lease: Seconds = Seconds(5.0)
    """How long a renewal of the lease is good: a database or an agent that is started anew within
    that harms nothing, and a failover takes that much longer. Without a lease store, how long a
    host is silent before it is powered off."""

    def as_json(self) -> dict[str, Any]:
        """Times in seconds."""
        return {**asdict(self), "failover": str(self.failover)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Raises TypeError, ValueError for what is none."""
        return cls(**{**told, "failover": Failover(told["failover"])})


FAILURE = Seconds(30 * 86400.0)
"""`one_failure_in` if the file does not say."""


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def period(time: Seconds) -> str:
    """A time as schedules have it: "15min", "7d"."""
    for size, unit in _UNITS:
        if time >= size and time % size == 0:
            return f"{time / size:g}{unit}"
    return f"{time:g}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How many of each; all 0: everything stays."""

    last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    monthly: int = 0

    @property
    def nothing_said(self) -> bool:
        """No rule at all: then nothing may go."""
        return all(getattr(self, one.name) <= 0 for one in fields(self))

    def __str__(self) -> str:
        said = [(one.name, getattr(self, one.name)) for one in fields(self)]
        return ", ".join(f"{count} {name}" for name, count in said if count) or "all"


@dataclass(frozen=True, slots=True)
class Auto:
    """As often as it pays (Young, Daly)."""

    one_failure_in: Seconds = FAILURE
    """What is assumed before anything is known."""


class Check(StrEnum):
    """How much of a snapshot is looked at."""

    SEALED = "sealed"
    """What can be proved without a private key: every bit of what is stored."""
    DEEP = "deep"
    """Every chunk is opened, too, and must fit its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How often the snapshots of a schedule are verified."""

    every: Seconds
    depth: Check = Check.SEALED


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTo:
    """Another store that snapshots are copied to, and what stays there."""

    store: str
    keep: Keep = field(default_factory=Keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When snapshots of a guest are taken, where they go, and which stay."""

    name: str
    """The tag that its snapshots have; what it prunes by."""
    when: When | Auto
    text: str
    """`when` as it was written: "every 15m", "daily 03:00"."""
    keep: Keep = field(default_factory=Keep)
    memory: bool = True
    group: bool = False
    """All guests that have it are captured as one consistent cut."""
    store: str | None = None
    """Where they land; None: in the first store of the inventory."""
    copies: tuple[CopyTo, ...] = ()
    verify: Proof | None = None


class Tls(StrEnum):
    """Whether the stream is encrypted."""

    REQUIRED = "required"
    PREFERRED = "preferred"
    """If both hosts have certificates."""
    OFF = "off"


class CopyKind(StrEnum):
    """What becomes of disks that the hosts do not share."""

    SHARED = "shared"
    """None is copied: they must be shared."""
    FULL = "full"
    """Copied; every byte is written on the target."""
    THIN = "thin"
    """Copied; what was never written takes no room on the target either."""


class LeftBehind(StrEnum):
    """What becomes of the images on the source once their copies have taken over."""

    KEEP = "keep"
    REMOVE = "remove"
    """Also from the way back: nothing is ever written over."""


class OnFailure(StrEnum):
    """What is done when a migration failed and the guest runs on the source."""

    RETRY = "retry"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Select:
    """Whom a policy is for. All that is given must hold; nothing given: everybody."""

    guests: tuple[str, ...] = ()
    """Globs, one of which must match the name."""
    guest_labels: tuple[tuple[str, str], ...] = ()
    host_labels: tuple[tuple[str, str], ...] = ()
    """Labels of the host the guest is on."""
    at_least: Bytes | None = None
    """Memory of the guest."""
    below: Bytes | None = None
    by_name_only: bool = False
    """It is for nobody who does not ask for it by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveLimits:
    """What a migration may use. None: no limit."""

    max_downtime: Seconds
    bandwidth: BytesPerSecond | None = None
    postcopy_bandwidth: BytesPerSecond | None = None
    time: Seconds | None = None
    time_per_gib: Seconds | None = None
    """For each GiB of the guest's memory; together with `time` the shorter one counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """Attempts after the first, with waits that grow."""

    times: int = 0
    first_wait: Seconds = Seconds(10.0)
    factor: float = 2.0
    longest_wait: Seconds = Seconds(300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """When a pre-copy counts as standing still, and for how long a good moment is waited for."""

    window: Seconds = Seconds(10.0)
    """No new low of what remains for that long: stalled."""
    margin: float = 0.04
    """A low that is lower by less than this share is none."""
    smoothing: float = 0.4
    """Weight of the newest bandwidth in the moving average."""
    patience: Seconds = Seconds(10.0)
    """How long a switch waits for a local minimum of what remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCondition:
    """Conditions of a rule; all that are given must hold."""

    iteration: int | None = None
    """In this pass over memory or a later one."""
    stalled_for: Seconds | None = None
    """Stalled, and for that long no pass began with less than the best one before."""
    dirty_over_bandwidth: float | None = None
    """The last pass left at least this share of what it sent dirty again; 1 never ends."""
    precopy_excess: float | None = None
    """Ending by pre-copy would send at least this share of the guest's memory more than a switch
    to post-copy now."""
    expected_downtime_above: Seconds | None = None
    expected_downtime_below: Seconds | None = None
    time_used: Seconds | None = None
    time_share: float | None = None
    """At least this share of the time limit is used."""
    remaining_above: Bytes | None = None
    remaining_below: Bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseDowntime:
    """Allow a longer switchover: by `by`, once a pass, until it is `to`."""

    by: Seconds
    to: Seconds


@dataclass(frozen=True, slots=True)
class Throttle:
    """Let QEMU slow the guest down from now on."""

    how: AutoConverge


@dataclass(frozen=True, slots=True)
class Compress:
    """Send differences to pages sent before (xbzrle) from now on, with a cache of that size."""

    cache: Bytes


@dataclass(frozen=True, slots=True)
class StartPostcopy:
    """Run the guest on the target now; the rest of its memory follows."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop the guest until it runs on the target."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the migration; the guest stays where it is."""


Do = RaiseDowntime | Throttle | Compress | StartPostcopy | Pause | GiveUp


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of `converge.rules`."""

    name: str
    """"rule 2" if the file gives it no name."""
    when: RuleCondition
    do: Do


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How the stream travels."""

    tls: Tls = Tls.PREFERRED
    connections: int = 1
    zero_copy: bool = False
    compression: Compression = Compression.NONE
    compression_level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What becomes of the guest's disks."""

    copy: CopyKind = CopyKind.SHARED
    disks: tuple[str, ...] = ()
    """Only these ("vda"); none: all that are not shared."""
    pool: str | None = None
    """Folder on the target, or a libvirt pool's name; None: the same path."""
    left_behind: LeftBehind = LeftBehind.KEEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a migration is to be done."""

    name: str
    file: str
    """Where it was read from, for messages."""
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
    """How long a broken post-copy is resumed by itself before the operator is asked."""
    probe: Seconds = Seconds(1.0)
    """How long the guest's dirty rate is measured before the move; 0: not."""
    protection: Protection = field(default_factory=Protection)
    evacuation: Evacuation = field(default_factory=Evacuation)
    snapshots: tuple[Schedule, ...] = ()
    """What `vmckpt run` takes by itself."""
    shipped: bool = False
    """It came with the program; the operator's own go first."""
    given: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    """Keys that the file gives, like "limits.time" and "converge.rules.0", with their lines."""

    @property
    def may_switch_early(self) -> bool:
        """Whether a migration under it may use post-copy."""
        return self.mode in (Mode.POSTCOPY, Mode.HYBRID, Mode.AUTO) and (
            self.mode is Mode.POSTCOPY
            or any(isinstance(rule.do, StartPostcopy) for rule in self.rules)
        )
