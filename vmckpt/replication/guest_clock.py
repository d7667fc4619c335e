"""Decide when to correct a guest's clock, which stops while the guest is paused. Pure.

The clock's difference from the host's at the first reading is considered intended: a guest whose
clock is set to another year keeps that year.
"""

from dataclasses import dataclass, replace

from vmckpt.units import Seconds

WORTH = Seconds(0.1)
"""A smaller difference is left to the guest's own time service."""
_SLACK = Seconds(1.0)
"""Largest difference, beyond the pauses, that inaccurate clocks and readings can explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of the guest's clock."""

    ahead: Seconds
    """How far the guest's clock is ahead of the host's; negative if it is behind."""
    doubt: Seconds
    """Uncertainty of the reading: half of the time that it took."""
    paused: Seconds
    """How long the guest has been paused since the previous reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What is known about a guest's clock."""

    usual: Seconds
    """How far the clock is meant to be ahead of the host's."""
    behind: Seconds = Seconds(0.0)
    """How far the clock is behind where it is meant to be."""
    corrected: int = 0
    """Number of corrections of the clock."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The clock after a reading, and whether to correct it now."""

    clock: Clock
    put_right: bool


def decide(clock: Clock | None, reading: Reading) -> Decision:
    """Decide whether a reading calls for a correction.

    `clock`: what was known before this reading; None for the first reading. If the clock differs by
    more than the pauses explain, it was set in the guest, and the new difference is considered
    intended.
    """
    if clock is None:
        return Decision(Clock(usual=reading.ahead), put_right=False)
    behind = Seconds(clock.usual - reading.ahead)
    if behind < -reading.doubt or behind > reading.paused + _SLACK + reading.doubt:
        # Pauses do not explain this difference: the clock was set in the guest.
        return Decision(replace(clock, usual=reading.ahead, behind=Seconds(0.0)), put_right=False)
    told = replace(clock, behind=behind)
    if behind <= max(WORTH, 2 * reading.doubt):
        return Decision(told, put_right=False)
    return Decision(replace(told, corrected=clock.corrected + 1), put_right=True)
