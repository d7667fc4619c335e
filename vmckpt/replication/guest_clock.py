"""A guest's clock, which stands still whenever the guest does, and when it is put right. Pure.

How far it is from the host's is taken for what its owner wants, from the first look on: a guest
that lives in another year goes on living there.
"""

from dataclasses import dataclass, replace

from vmckpt.units import Seconds

WORTH = Seconds(0.1)
"""So little is left to the guest's own time service."""
_SLACK = Seconds(1.0)
"""What clocks and looks may be off, beside the pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at the guest's clock."""

    ahead: Seconds
    """Of the host's; negative: behind it."""
    doubt: Seconds
    """Half of what the look took."""
    paused: Seconds
    """For how long the guest has stood still since the look before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """What is known of it."""

    usual: Seconds
    """How far it is ahead of the host's by its owner's will."""
    behind: Seconds = Seconds(0.0)
    corrected: int = 0
    """How often it was put right."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a look comes to."""

    clock: Clock
    put_right: bool


def decide(clock: Clock | None, reading: Reading) -> Decision:
    """`clock`: None at the first look."""
    if clock is None:
        return Decision(Clock(usual=reading.ahead), put_right=False)
    behind = Seconds(clock.usual - reading.ahead)
    if behind < -reading.doubt or behind > reading.paused + _SLACK + reading.doubt:
        # No pause does that: somebody has set it.
        return Decision(replace(clock, usual=reading.ahead, behind=Seconds(0.0)), put_right=False)
    told = replace(clock, behind=behind)
    if behind <= max(WORTH, 2 * reading.doubt):
        return Decision(told, put_right=False)
    return Decision(replace(told, corrected=clock.corrected + 1), put_right=True)
