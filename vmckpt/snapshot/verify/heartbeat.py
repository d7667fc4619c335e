"""Decide whether a restored guest is alive, from samples taken over several seconds. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.model.guest import GuestState, Pulse

_SPINS = 0.95
"""A guest that writes nothing is in an endless loop if its vCPUs are busy for this share of the
time."""


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """Whether a guest is alive, and why."""

    lives: bool
    why: str


def ended(last: Pulse) -> str:
    """Return why the guest is certainly not alive; empty if it may be alive."""
    if last.panicked:
        return "its kernel panicked"
    if last.state is None or not last.state.is_active:
        return "it stopped by itself"
    if last.io_error:
        return "it was paused by a disk I/O error"
    if last.state is GuestState.PAUSED:
        return "it is paused"
    return ""


def evaluate(pulses: Sequence[Pulse], *, agent: bool | None) -> HeartbeatResult:
    """Decide from samples, oldest first, whether a guest is alive.

    `agent`: whether its guest agent answered; None if no guest agent answered when the
    snapshot was taken.
    """
    first, last = pulses[0], pulses[-1]
    if why := ended(last):
        return HeartbeatResult(lives=False, why=why)
    if agent:
        return HeartbeatResult(lives=True, why="its guest agent answers")
    took = last.at - first.at
    worked = last.worked - first.worked
    share = worked / (took * max(1, last.processors)) if took > 0 else 0.0
    wrote = last.written > first.written
    moved = wrote or last.read > first.read or any(one.dirtied for one in pulses)
    seen = f"its vCPUs were busy {share:.0%} of {took:.0f} s"
    if agent is False:
        return HeartbeatResult(lives=False, why=f"its guest agent no longer answers; {seen}")
    if worked <= 0:
        return HeartbeatResult(lives=False, why="its vCPUs did not run")
    if share >= _SPINS and not moved:
        return HeartbeatResult(
            lives=False, why=f"{seen}, but it wrote nothing: it may be in an endless loop"
        )
    rest = (
        "wrote to its disks"
        if wrote
        else "read its disks or wrote to memory"
        if moved
        else "wrote almost nothing"
    )
    return HeartbeatResult(lives=True, why=f"{seen}, and it {rest}")
