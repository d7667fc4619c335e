"""Actions on a running migration. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.migration import AutoConverge
from vmckpt.units import Bytes, BytesPerSecond, Seconds, show_bytes, show_rate, show_seconds


class Stop(StrEnum):
    """Why a migration is being stopped."""

    OPERATOR = "operator"
    TIME_LIMIT = "time limit"
    RULE = "policy"


@dataclass(frozen=True, slots=True)
class SetDowntime:
    """Allow a downtime of up to this length at the switchover."""

    limit: Seconds


@dataclass(frozen=True, slots=True)
class SetThrottle:
    """Let QEMU throttle the guest."""

    how: AutoConverge


@dataclass(frozen=True, slots=True)
class SetXbzrleCache:
    """Send only the differences of resent pages (XBZRLE), with a cache of this size."""

    size: Bytes


@dataclass(frozen=True, slots=True)
class LimitBandwidth:
    """Limit the bandwidth, before and after the switch. Only an operator can request this."""

    bandwidth: BytesPerSecond | None
    """The limit; None: no limit."""


@dataclass(frozen=True, slots=True)
class SwitchToPostcopy:
    """Run the guest on the target now."""


@dataclass(frozen=True, slots=True)
class PauseGuest:
    """Pause the guest until it resumes on the target."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort the job; the guest stays on the source."""

    why: Stop


Action = (
    SetDowntime
    | SetThrottle
    | SetXbzrleCache
    | LimitBandwidth
    | SwitchToPostcopy
    | PauseGuest
    | Abort
)


def says(action: Action) -> str:
    """Return the action in a few words, for progress and reports. `replay` compares this text."""
    match action:
        case SetDowntime(limit):
            return f"allow {show_seconds(limit)} of downtime"
        case SetThrottle(how):
            return f"slow the guest down by {how.initial} % to {how.at_most} %"
        case SetXbzrleCache(size):
            return f"compress with a cache of {show_bytes(size)}"
        case LimitBandwidth(rate):
            return "lift the limit" if rate is None else f"limit to {show_rate(rate)}"
        case SwitchToPostcopy():
            return "switch to post-copy"
        case PauseGuest():
            return "pause the guest"
        case Abort():
            return "abort"
