"""Decide when to pause a guest for the final epoch of its migration by epochs. Pure.

The cost of the final epoch is estimated from earlier epochs: their pauses, and the time until the
target had received them. The guest stays paused while the final epoch is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vmckpt.units import Seconds, show_seconds

_LOADS = Seconds(0.05)
"""Time to load the device state and resume the guest; docs/replication.md has measurements."""
_ENOUGH = 3
"""Number of consecutive epochs that must be within the limit, since the cost of epochs varies."""


class SwitchoverAction(StrEnum):
    """The next action in a migration by epochs."""

    GO_ON = "go on"
    SWITCH = "switch"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one epoch."""

    pause: Seconds
    busy: Seconds
    """Time from the end of the pause until the target had received the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchoverFacts:
    """The progress of the migration."""

    elapsed: Seconds
    ready: bool
    """The target has a complete epoch, and the primary's agent is running."""
    recent: Sequence[Cost] = field(default=())
    """The costs of the latest epochs, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The policy's limits for a migration by epochs."""

    max_downtime: Seconds
    time: Seconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchoverDecision:
    """What to do, and why."""

    do: SwitchoverAction
    why: str
    downtime: Seconds | None
    """Expected downtime of a switchover now; None if there are no epochs for an estimate."""


def decide(seen: SwitchoverFacts, limits: Limits) -> SwitchoverDecision:
    """Return what to do next.

    If the expected downtime is within its limit, this is a switchover, even after the time limit.
    """
    downtime = expected(seen.recent) if seen.ready else None
    allowed = show_seconds(limits.max_downtime)
    if downtime is not None and len(seen.recent) >= _ENOUGH and downtime <= limits.max_downtime:
        why = (
            f"the final epoch is expected to take {show_seconds(downtime)}; the limit is {allowed}"
        )
        return SwitchoverDecision(do=SwitchoverAction.SWITCH, why=why, downtime=downtime)
    if limits.time is not None and seen.elapsed >= limits.time:
        why = "the first copy was not complete"
        if downtime is not None:
            why = f"a switchover would take {show_seconds(downtime)}; the limit is {allowed}"
        return SwitchoverDecision(
            do=SwitchoverAction.GIVE_UP, why=f"time limit reached: {why}", downtime=downtime
        )
    return SwitchoverDecision(do=SwitchoverAction.GO_ON, why="", downtime=downtime)


def expected(recent: Sequence[Cost]) -> Seconds | None:
    """Return the expected downtime of a switchover now; None if there are no epochs.

    This is the highest cost among the latest epochs, plus the time to load an epoch.
    """
    last = recent[-_ENOUGH:]
    if not last:
        return None
    return Seconds(max(cost.pause + cost.busy for cost in last) + _LOADS)
