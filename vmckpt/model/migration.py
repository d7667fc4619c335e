"""Data of a migration: the order to libvirt, statistics, measurements, the engine's protocols."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType, NoneType
from typing import Any, Protocol

from vmckpt.model.guest import Presence
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class Driver(StrEnum):
    """The process that drives a migration."""

    PEER_TO_PEER = "peer-to-peer"
    """The source's libvirtd. The migration continues if the controller dies."""
    CLIENT = "client-driven"
    """The controller. The migration fails if the controller dies, which is safe before
    post-copy."""
    AGENTS = "by agents"
    """Agents on both hosts, as for a protection. The controller decides when to switch over."""


class Mode(StrEnum):
    """How a guest's memory gets to the target."""

    AUTO = "auto"
    """The mode that the forecast finds best within the policy."""
    PRECOPY = "precopy"
    """All memory is sent before the switchover, in several passes."""
    POSTCOPY = "postcopy"
    """The guest runs on the target once sending has begun, and fetches the rest of its memory."""
    HYBRID = "hybrid"
    """Pre-copy, then post-copy if a rule of the policy requires it."""
    STOP_AND_COPY = "stop-and-copy"
    """The guest is paused while its memory is sent."""
    CHECKPOINT = "checkpoint"
    """Epochs, as for a protection, until the last epoch is small enough. libvirt's migration is
    not used."""

    @property
    def may_switch_early(self) -> bool:
        """Whether the order must allow post-copy."""
        return self in (Mode.POSTCOPY, Mode.HYBRID)


class Compression(StrEnum):
    """Compression of the memory stream."""

    NONE = "none"
    XBZRLE = "xbzrle"
    """Sends only the differences of resent pages; needs a cache on the source."""
    MT = "mt"
    """Compresses each page with zlib in threads; removed in QEMU 9.1."""
    ZLIB = "zlib"
    """Compresses each of the parallel connections with zlib."""
    ZSTD = "zstd"
    """Compresses each of the parallel connections with zstd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConverge:
    """How QEMU throttles a guest that writes faster than the link can carry, in percent of CPU."""

    initial: int
    increment: int
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """Everything that libvirt needs to know to migrate a guest."""

    driver: Driver
    persistent: bool
    """The guest is defined on the source: define it on the target and undefine it on the source."""
    autostart: bool
    """Start the guest when the target host boots; libvirt does not transfer this setting."""
    storage_proven: bool
    """The disks, except `copied_disks`, were verified to be the same files on both hosts, so
    libvirt's own safety check is skipped."""
    bandwidth: BytesPerSecond | None
    """Bandwidth limit; None: no limit."""
    live: bool = True
    """Whether the guest runs during the migration; if not, it is paused (stop-and-copy)."""
    post_copy: bool = False
    """The migration may be switched to post-copy while it runs."""
    postcopy_bandwidth: BytesPerSecond | None = None
    """Bandwidth limit after the switch to post-copy; None: no limit."""
    auto_converge: AutoConverge | None = None
    """How QEMU may throttle the guest; None: not at all."""
    tls_name: str | None = None
    """The name that the target's certificate must be valid for; None: no encryption."""
    connections: int = 1
    """Number of connections for memory pages; more than one uses QEMU's multifd."""
    zero_copy: bool = False
    compression: Compression = Compression.NONE
    compression_level: int | None = None
    xbzrle_cache: Bytes | None = None
    """Size of the XBZRLE cache; None: QEMU's default of 64 MiB."""
    copied_disks: tuple[str, ...] = ()
    """Names ("vda") of disks that the hosts do not share; libvirt copies them over NBD to images
    that already exist on the target."""
    shallow: bool = False
    """Copy only the data above the disks' backing files, which the target has."""
    resume: bool = False
    """Resume a post-copy that broke; everything else must be as in the first order."""

    def as_json(self) -> dict[str, Any]:
        """Return the order for the journal, to resume a broken post-copy with the same order.

        Omits the guest's definitions: they may contain passwords, and a resume does not need them.
        """
        return asdict(self) | {"target_xml": None, "target_definition": None}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "MoveOrder":
        """Parse a stored order. Raises TypeError, KeyError or ValueError if it is invalid."""
        _check(stored)
        slowing = stored["auto_converge"]
        return MoveOrder(
            **{
                **stored,
                "driver": Driver(stored["driver"]),
                "compression": Compression(stored["compression"]),
                "copied_disks": tuple(stored["copied_disks"]),
                "auto_converge": None if slowing is None else AutoConverge(**slowing),
            }
        )

    target_xml: str | None = None
    """XML for the running guest on the target; None: the same as on the source."""
    target_definition: str | None = None
    """XML for the guest's definition on the target; None: the same as on the source."""


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("persistent", "autostart", "storage_proven", "live", "post_copy"), (bool,)),
    **dict.fromkeys(("zero_copy", "resume", "shallow"), (bool,)),
    "connections": (int,),
    **dict.fromkeys(("bandwidth", "postcopy_bandwidth", "xbzrle_cache"), (int, NoneType)),
    "compression_level": (int, NoneType),
    **dict.fromkeys(("tls_name", "target_xml", "target_definition"), (str, NoneType)),
    "auto_converge": (dict, NoneType),
    "copied_disks": (list, tuple),
}
_MOST = 1 << 60


def _check(stored: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError if a stored order has invalid values."""
    slowing = stored["auto_converge"] or {}
    for name, value in stored.items():
        kinds = _KINDS.get(name)
        # In Python, a bool is also an int.
        if kinds is not None and (not isinstance(value, kinds) or _is_wrong_bool(value, kinds)):
            raise TypeError(f"{name} has an invalid type: {str(value)[:40]!r}")
    for name, value in (*stored.items(), *slowing.items()):
        if isinstance(value, int) and not 0 <= value <= _MOST:
            raise ValueError(f"{name} is out of range: {str(value)[:40]}")
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in slowing.values()):
        raise TypeError("a value of auto_converge is not an integer")
    if not all(isinstance(disk, str) for disk in stored["copied_disks"]):
        raise TypeError("a name in copied_disks is not a string")


def _is_wrong_bool(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds


class JobPhase(StrEnum):
    """The phase of a migration."""

    PREFLIGHT = "preflight"
    SETUP = "setup"
    PRE_COPY = "pre-copy"
    POST_COPY = "post-copy"
    POST_COPY_PAUSED = "postcopy-paused"
    """The stream broke: the guest on the target is waiting for pages that are on the source."""
    PAUSED = "paused"
    """The policy paused the guest so that the rest of its memory can be sent."""
    SWITCHOVER = "switchover"
    CLEANUP = "cleanup"
    CANCELLING = "cancelling"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSample:
    """One sample of a running migration job."""

    at: Seconds
    """Monotonic time of the sample."""
    phase: JobPhase
    iteration: int
    """Number of the pass over memory, from 1; 0 before the first."""
    remaining: Bytes
    """Memory and disk still to be sent, as known now."""
    total: Bytes
    transferred: Bytes
    """Bytes sent so far, including resent pages, so it can exceed `total`."""
    bandwidth: BytesPerSecond
    dirty_rate: BytesPerSecond | None
    """Rate at which the guest writes memory; None until QEMU has measured it, which takes the first
    pass and at least one second.
    """
    expected_downtime: Seconds | None
    """QEMU's estimate; None until there is one."""
    throttle: int
    """CPU time that auto-converge takes from the guest, in percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTotals:
    """The statistics of a completed migration."""

    total: Seconds
    setup: Seconds | None
    downtime: Seconds | None
    """Downtime measured by QEMU, including the handover. QEMU compares the clocks of two hosts."""
    iterations: int
    transferred: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision during a migration, with the numbers that it is based on."""

    at: Seconds
    """Monotonic time of the decision."""
    action: str
    reason: str
    rule: str = ""
    """What caused the decision: a rule of the policy, by name, "operator", "time limit", …"""
    acted: bool = True
    """Whether the decision was carried out; if not, the rule is only observed."""
    numbers: Mapping[str, float | int | str | None] = field(
        default_factory=lambda: MappingProxyType({})
    )


class FailureSide(StrEnum):
    """The side to which a failure is attributed."""

    TARGET = "target"
    GUEST = "guest"
    """A move to any host would fail: for example, the guest does not converge."""


class Outcome(StrEnum):
    """How a migration ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed-out"
    NOT_CONVERGED = "not-converged"
    """A rule aborted the migration, for example because the guest writes too fast."""
    FAILED = "failed"
    SHUT_OFF = "shut-off"
    """The guest is running on neither host: it stopped during the migration."""
    POST_COPY_PAUSED = "postcopy-paused"
    """The stream of a post-copy broke and was not resumed; both parts of the guest are kept."""
    LOST = "lost"
    """The guest is in no complete state on either host, as when one side of post-copy died."""
    UNKNOWN = "unknown"
    BLOCKED = "blocked"
    PLANNED = "planned"
    """Preflight passed, and only a plan was requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirtyPoint:
    """The number of distinct bytes that a guest wrote within a time."""

    time: Seconds
    dirtied: float
    """Number of distinct bytes."""
    error: float
    """Uncertainty in bytes, plus or minus: two standard deviations of sampling, plus rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """A guest's memory, estimated from a sample of its pages."""

    size: Bytes
    """Size of the guest's memory."""
    resident: float
    """Bytes that the host has allocated, including swapped pages."""
    in_use: float
    """Bytes of pages that are not all zero; a migration sends these completely."""
    error: float
    """Uncertainty of `in_use` in bytes, plus or minus: two standard deviations."""
    dirtied: tuple[DirtyPoint, ...]
    tail: tuple[tuple[float, float], ...]
    """Pairs of a length and the bytes in use in a part of this length at the end of memory.

    The lengths increase, up to all memory.
    """
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """The measured throughput of one TCP connection from source to target."""

    rate: BytesPerSecond
    """Rate without the initial phase, in which buffers and token buckets inflate it."""
    received: Bytes
    lasted: Seconds


class MigrationDriver(Protocol):
    """The calls that control the migration of one guest.

    Calls that change something raise HypervisorError, ReadOnly, and OutcomeUnknown if the
    connection broke.
    """

    async def migrate(self, order: MoveOrder) -> None:
        """Migrate the guest. Returns when the guest is running on the target.

        Raises PeerLoginFailed if the source could not log in to the target (nothing happened),
        HypervisorError if libvirt reports a failure, OutcomeUnknown if the connection broke.
        """

    async def sample(self) -> JobSample | None:
        """Return the job's current statistics; None if no migration job is running."""

    async def totals(self) -> JobTotals | None:
        """Return the statistics of the completed migration; None if the target has none."""

    async def switchover(self) -> Seconds | None:
        """Return for how long the guest was paused for the switch to post-copy; None if unknown."""

    async def abort(self) -> None:
        """Abort the running job. Does nothing if it has ended."""

    async def set_autostart(self) -> None:
        """Make the guest start whenever the target host boots."""

    async def set_max_downtime(self, limit: Seconds) -> None:
        """Let QEMU switch over once it expects a downtime of at most `limit`."""

    async def max_downtime(self) -> Seconds:
        """Return the current downtime limit."""

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        """Limit the bandwidth before or, with `post_copy`, after the switch to post-copy; None: no
        limit.
        """

    async def throttle(self, how: AutoConverge | None) -> None:
        """Set how QEMU throttles the guest, in a job with auto-converge; None: QEMU's default."""

    async def set_cache(self, size: Bytes) -> None:
        """Set the cache size of a job with xbzrle compression."""

    async def pause_guest(self) -> None:
        """Pause the guest. libvirt resumes it on the target, or on the source after a failure."""

    async def start_post_copy(self) -> None:
        """Switch to post-copy: run the guest on the target now. This cannot be undone."""

    async def is_postcopy_paused(self) -> bool:
        """Return whether the source's QEMU has paused a broken post-copy, so it can be resumed."""

    async def free_target(self) -> None:
        """Make the target close its end of a broken stream. Does nothing if there is none."""

    async def undefine_on_source(self) -> bool:
        """Undefine the shut-off guest that a completed migration left on the source.

        Returns whether there was one.
        """

    async def undefine_on_target(self) -> bool:
        """Undefine the shut-off guest that a failed migration left on the target.

        Returns whether there was one.
        """

    async def presence(self) -> tuple[Presence, Presence]:
        """Return the guest's state on the source and on the target."""


class OutsideView(Protocol):
    """An observer of guests from outside, with a clock that keeps running when guests stop."""

    async def blackout(self, guest: str, since: Seconds, until: Seconds) -> Seconds | None:
        """Return the longest time, in seconds, in which the guest named `guest` did not answer.

        Only the time between `since` and `until` counts; both are readings of time.monotonic().
        None if the guest was not observed then.
        """
