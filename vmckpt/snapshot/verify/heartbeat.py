"""Whether a restored guest lives, by what was seen of it for some seconds. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.model.guest import GuestState, Pulse

_SPINS = 0.95
"""A processor that is busy for such a part of the time, and writes nothing, turns in a circle."""


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """What is said of it."""

    lives: bool
    why: str


def ended(last: Pulse) -> str:
    """Why there is nothing more to be waited for; empty if there is."""
    if last.panicked:
        return "its kernel panicked"
    if last.state is None or not last.state.is_active:
        return "it ended by itself"
    if last.io_error:
        return "it was stopped: a disk cannot be read or written"
    if last.state is GuestState.PAUSED:
        return "it stands still"
    return ""


def evaluate(pulses: Sequence[Pulse], *, agent: bool | None) -> HeartbeatResult:
    """`agent`: whether its guest agent answered; None: it had none when the snapshot was made."""
    first, last = pulses[0], pulses[-1]
    if why := ended(last):
        return HeartbeatResult(lives=False, why=why)
    if agent:
        return HeartbeatResult(lives=True, why="its agent answers")
    took = last.at - first.at
    worked = last.worked - first.worked
    share = worked / (took * max(1, last.processors)) if took > 0 else 0.0
    wrote = last.written > first.written
    moved = wrote or last.read > first.read or any(one.dirtied for one in pulses)
    seen = f"its processors worked {share:.0%} of {took:.0f} s"
    if agent is False:
        return HeartbeatResult(lives=False, why=f"its agent does not answer any more; {seen}")
    if worked <= 0:
        return HeartbeatResult(lives=False, why="its processors did nothing at all")
    if share >= _SPINS and not moved:
        return HeartbeatResult(lives=False, why=f"{seen} and wrote nothing: it turns in a circle")
    rest = (
        "wrote to its disks" if wrote else "wrote to memory" if moved else "wrote hardly anything"
    )
    return HeartbeatResult(lives=True, why=f"{seen}, and it {rest}")
