"""A policy, read and checked. The file's form is in `document`. Pure data."""

from dataclasses import dataclass, field
from enum import StrEnum

from vmckpt.model.migration import AutoConverge, Compression, Mode
from vmckpt.policy.evacuation import Evacuation
from vmckpt.policy.protection import Protection
from vmckpt.policy.schedules import Schedule
from vmckpt.units import Bytes, BytesPerSecond, Seconds


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
class When:
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
    when: When
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
