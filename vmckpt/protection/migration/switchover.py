"""When a guest that moves by epochs stands still for the last one. Pure.

What the last epoch will cost shows in those before it: its pause, and how long it takes until the
target has it. While it travels the guest stands still.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vmckpt.units import Seconds, show_seconds

_LOADS = Seconds(0.05)
"""Device state is loaded and the guest begins; docs/replication.md has measurements."""
_ENOUGH = 3
"""Epochs that must fit one after the other: what a single one costs is luck."""


class SwitchoverAction(StrEnum):
    """What is done next."""

    GO_ON = "go on"
    SWITCH = "switch"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one epoch was."""

    pause: Seconds
    busy: Seconds
    """From then until the target had it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchoverFacts:
    """How far it is."""

    elapsed: Seconds
    ready: bool
    """The target has a whole epoch, and the guest's agent goes on with it."""
    recent: Sequence[Cost] = field(default=())
    """The last epochs, the newest last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the policy allows."""

    max_downtime: Seconds
    time: Seconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchoverDecision:
    """What is done, and why."""

    do: SwitchoverAction
    why: str
    downtime: Seconds | None
    """What a switch now is expected to cost; None: nothing to tell by yet."""


def decide(seen: SwitchoverFacts, limits: Limits) -> SwitchoverDecision:
    """Switch when the expected downtime fits the limit, even after the time limit."""
    downtime = expected(seen.recent) if seen.ready else None
    allowed = show_seconds(limits.max_downtime)
    if downtime is not None and len(seen.recent) >= _ENOUGH and downtime <= limits.max_downtime:
        why = f"the last epoch is expected to take {show_seconds(downtime)}, {allowed} is allowed"
        return SwitchoverDecision(do=SwitchoverAction.SWITCH, why=why, downtime=downtime)
    if limits.time is not None and seen.elapsed >= limits.time:
        why = "it was still copied for the first time"
        if downtime is not None:
            why = f"a switch would take {show_seconds(downtime)}, and {allowed} is allowed"
        return SwitchoverDecision(
            do=SwitchoverAction.GIVE_UP, why=f"time limit reached: {why}", downtime=downtime
        )
    return SwitchoverDecision(do=SwitchoverAction.GO_ON, why="", downtime=downtime)


def expected(recent: Sequence[Cost]) -> Seconds | None:
    """What a switch now would cost: as the worst of the last epochs, and loading it."""
    last = recent[-_ENOUGH:]
    if not last:
        return None
    return Seconds(max(cost.pause + cost.busy for cost in last) + _LOADS)
