"""A migration: the order to libvirt, statistics, measurements, and the engine's protocols."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType, NoneType
from typing import Any, Protocol

from vmckpt.model.guest import Presence
from vmckpt.units import Bytes, BytesPerSecond, Seconds


class Driver(StrEnum):
    """Who drives a migration."""

    PEER_TO_PEER = "peer-to-peer"
    """The source's libvirtd: it goes on when the controller dies."""
    CLIENT = "client-driven"
    """The controller: it ends when the controller dies; before post-copy without harm."""
    AGENTS = "by agents"
    """Agents on both hosts, as for a protection; the controller says when to switch."""


class Mode(StrEnum):
    """How a guest's memory gets to the target."""

    AUTO = "auto"
    """Whichever of the others the forecast finds best within the policy."""
    PRECOPY = "precopy"
    """All memory before the switch, pass after pass."""
    POSTCOPY = "postcopy"
    """The guest runs on the target as soon as the first pass is over; the rest follows."""
    HYBRID = "hybrid"
    """Pre-copy, and post-copy from the point where the policy's rules say so."""
    STOP_AND_COPY = "stop-and-copy"
    """The guest stands still while its memory is copied."""
    CHECKPOINT = "checkpoint"
    """Epochs, as of a protection, until the last one is small enough; not by libvirt."""

    @property
    def may_switch_early(self) -> bool:
        """Whether the order must allow post-copy."""
        return self in (Mode.POSTCOPY, Mode.HYBRID)


class Compression(StrEnum):
    """How the memory stream is made smaller."""

    NONE = "none"
    XBZRLE = "xbzrle"
    """Differences to pages sent before; needs a cache on the source."""
    MT = "mt"
    """Each page by zlib in threads; gone from QEMU 9.1 on."""
    ZLIB = "zlib"
    """Each of the parallel connections by zlib."""
    ZSTD = "zstd"
    """Each of the parallel connections by zstd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConverge:
    """How QEMU slows a guest down that writes faster than the link carries; per cent of CPU."""

    initial: int
    increment: int
    at_most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOrder:
    """Everything libvirt must be told to move a guest."""

    driver: Driver
    persistent: bool
    """The guest is defined on the source: define it on the target and not on the source."""
    autostart: bool
    """Start the guest with the target host from now on; libvirt does not carry that over."""
    storage_proven: bool
    """The disks (but for `copied_disks`) were seen to be the same files on both hosts, so libvirt
    need not doubt it."""
    bandwidth: BytesPerSecond | None
    """None: no limit."""
    live: bool = True
    """False: the guest stands still meanwhile (stop-and-copy)."""
    post_copy: bool = False
    """It may be switched to post-copy while it runs."""
    postcopy_bandwidth: BytesPerSecond | None = None
    """Limit after that switch; None: none."""
    auto_converge: AutoConverge | None = None
    """None: QEMU may not slow the guest down."""
    tls_name: str | None = None
    """The name that the target's certificate must carry; None: the stream is not encrypted."""
    connections: int = 1
    """More than one: the pages travel over that many (QEMU's multifd)."""
    zero_copy: bool = False
    compression: Compression = Compression.NONE
    compression_level: int | None = None
    xbzrle_cache: Bytes | None = None
    """None: QEMU's 64 MiB."""
    copied_disks: tuple[str, ...] = ()
    """Disks ("vda") that both hosts do not share: copied over NBD, to images made there before."""
    resume: bool = False
    """Go on with a post-copy that broke; all the rest must be as it was."""

    def as_json(self) -> dict[str, Any]:
        """For the journal: a broken post-copy is resumed with the same order.

        Without the guest's definitions: a resumed stream needs none, and they may hold passwords.
        """
        return asdict(self) | {"target_xml": None, "target_definition": None}

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> "MoveOrder":
        """The order again. Raises TypeError, KeyError or ValueError if that is none."""
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
    """The running guest as the target must see it; None: as on the source."""
    target_definition: str | None = None
    """The guest as it is to be defined there; None: as on the source."""


_KINDS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("persistent", "autostart", "storage_proven", "live", "post_copy"), (bool,)),
    **dict.fromkeys(("zero_copy", "resume"), (bool,)),
    "connections": (int,),
    **dict.fromkeys(("bandwidth", "postcopy_bandwidth", "xbzrle_cache"), (int, NoneType)),
    "compression_level": (int, NoneType),
    **dict.fromkeys(("tls_name", "target_xml", "target_definition"), (str, NoneType)),
    "auto_converge": (dict, NoneType),
    "copied_disks": (list, tuple),
}
_MOST = 1 << 60


def _check(stored: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError if a stored order holds what no order has."""
    slowing = stored["auto_converge"] or {}
    for name, value in stored.items():
        kinds = _KINDS.get(name)
        # A bool is an int to Python.
        if kinds is not None and (not isinstance(value, kinds) or _is_wrong_bool(value, kinds)):
            raise TypeError(f"{name} is {str(value)[:40]!r}")
    for name, value in (*stored.items(), *slowing.items()):
        if isinstance(value, int) and not 0 <= value <= _MOST:
            raise ValueError(f"{name} is {str(value)[:40]}")
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in slowing.values()):
        raise TypeError("auto_converge is not in per cent")
    if not all(isinstance(disk, str) for disk in stored["copied_disks"]):
        raise TypeError("copied_disks are not names")


def _is_wrong_bool(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, bool) and bool not in kinds


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DirtyPoint:
    """How many different bytes a guest wrote within a time."""

    time: Seconds
    dirtied: float
    """Bytes."""
    error: float
    """Bytes either way: two standard deviations of the sampling, and the rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """A guest's memory as a sample of its pages shows it."""

    size: Bytes
    """All of it."""
    resident: float
    """Bytes that the host has given room to, swapped ones included."""
    in_use: float
    """Bytes of pages that are not all zero: those are sent whole."""
    error: float
    """Bytes of `in_use` either way, two standard deviations."""
    dirtied: tuple[DirtyPoint, ...]
    tail: tuple[tuple[float, float], ...]
    """(bytes from the end of memory, of which in use), rising to all of it."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """What one TCP connection carried from source to target."""

    rate: BytesPerSecond
    """After the beginning, which buffers and token buckets flatter."""
    received: Bytes
    lasted: Seconds


class MigrationDriver(Protocol):
    """What a migration may do to the one guest it moves."""

    async def migrate(self, order: MoveOrder) -> None:
        """Migrate. Returns when the guest runs on the target.

        Raises PeerLoginFailed if the source could not log in at the target (nothing happened),
        HypervisorError if libvirt says it failed, OutcomeUnknown if the connection broke.
        """

    async def sample(self) -> JobSample | None:
        """The job's statistics now; None if no migration job runs."""

    async def totals(self) -> JobTotals | None:
        """Statistics of the completed migration, from the target; None if they are gone."""

    async def abort(self) -> None:
        """Abort the running job; no error if it has ended."""

    async def set_autostart(self) -> None:
        """Start the guest with the target host from now on."""

    async def set_max_downtime(self, limit: Seconds) -> None:
        """Let QEMU switch over once it expects a downtime of at most `limit`."""

    async def max_downtime(self) -> Seconds:
        """The limit in force now."""

    async def set_bandwidth(self, limit: BytesPerSecond | None, *, post_copy: bool) -> None:
        """Limit the job's stream, before or after the switch to post-copy; None: no limit."""

    async def throttle(self, how: AutoConverge | None) -> None:
        """Let QEMU slow the guest down, in a job that was started for it; None: as QEMU came."""

    async def set_cache(self, size: Bytes) -> None:
        """Give a job that was started with xbzrle a cache of that size."""

    async def pause_guest(self) -> None:
        """Stop the guest; libvirt starts it on the target, or here if the migration fails."""

    async def start_post_copy(self) -> None:
        """Run the guest on the target now. There is no way back."""

    async def is_postcopy_paused(self) -> bool:
        """Whether the source's QEMU has given a post-copy's stream up: then it can be resumed."""

    async def free_target(self) -> None:
        """Make the target let go of a dead stream as well; no error if there is none."""

    async def undefine_on_source(self) -> bool:
        """Undefine what a completed migration left shut off on the source; whether it did."""

    async def undefine_on_target(self) -> bool:
        """Undefine what a failed migration left shut off on the target; whether it did."""

    async def presence(self) -> tuple[Presence, Presence]:
        """What source and target say about the guest now."""


class OutsideView(Protocol):
    """Somebody who watches a guest from outside, by a clock that does not stop with it."""

    async def blackout(self, guest: str, since: Seconds, until: Seconds) -> Seconds | None:
        """The longest silence in a window of monotonic time; None if the guest is not watched."""
