"""Progress of a whole-host job's moves, derived from the journal. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.journal.jobs import JobView
from vmckpt.journal.records import Operation, State, StepState, StoredStep

MOVE = "move"
"""Name of the step that moves a guest without a separate job: a guest that is off or protected."""
STANDBY = "standby"
"""Name of the step that moves a standby to another host."""
SHUT_DOWN = "shut-down"
"""Name of the step that shuts down or suspends a guest."""
COMPLETED, WAITS = "completed", "waits"
_Attempt = tuple[float, str, JobView | StoredStep]
"""The start time of an attempt, the guest, and the attempt."""
_STEPS = {StepState.DONE: COMPLETED, StepState.INTENDED: "under way"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A guest to be moved, and the state of the move."""

    guest: str
    source: str
    target: str
    begins: float | None
    """Planned start, in seconds since the job began; None: not planned."""
    ends: float | None
    state: str = WAITS
    active: bool = False
    view: JobView | None = None
    """The guest's last migration; None: the guest is waiting, or its move is a step of the job."""
    tries: int = 0


def turns(
    operation: Operation, parts: Sequence[JobView], steps: Sequence[StoredStep]
) -> Sequence[Turn]:
    """Return all moves of a job: first the moves that have begun, then the planned moves.

    Moves are sorted by start time. `parts`: the job's migrations. `steps`: the steps of the job
    itself.
    """
    begun: list[_Attempt] = [
        (one.operation.began_at, one.operation.guest, one)
        for one in parts
        if not (one.operation.report or {}).get("dismissed")  # dismissed before the move started
    ]
    moved: list[_Attempt] = [
        (one.began_at, str(one.intent.get("called") or one.intent["guest"]), one)
        for one in steps if one.name in (MOVE, STANDBY)
    ]  # fmt: skip
    tries: dict[str, list[JobView | StoredStep]] = {}
    for _, guest, attempt in sorted(begun + moved, key=lambda one: one[0]):
        tries.setdefault(guest, []).append(attempt)
    planned: Mapping[str, Mapping[str, Any]] = {
        str(one["guest"]): one for one in operation.detail.get("moves") or ()
    }
    found = [
        _turn(guest, attempts, planned.get(guest, {}), operation)
        for guest, attempts in tries.items()
    ]
    waiting = [
        Turn(guest=guest, source=str(one["from"]), target=str(one["to"]),
             begins=_seconds(one.get("begins_ms")), ends=_seconds(one.get("ends_ms")))
        for guest, one in planned.items() if guest not in tries
    ]  # fmt: skip
    return [*found, *sorted(waiting, key=lambda one: (one.begins is None, one.begins or 0.0))]


def _turn(
    guest: str, attempts: Sequence[JobView | StoredStep], plan: Mapping[str, Any],
    operation: Operation,
) -> Turn:  # fmt: skip
    """Build a guest's `Turn` from the last attempt to move the guest."""
    last = attempts[-1]
    begins, ends = _seconds(plan.get("begins_ms")), _seconds(plan.get("ends_ms"))
    if isinstance(last, JobView):
        one = last.operation
        return Turn(
            guest=guest, source=one.source or "", target=one.target or "", begins=begins,
            ends=ends, state=last.doing, active=one.active, view=last, tries=len(attempts),
        )  # fmt: skip
    under = last.state is StepState.INTENDED
    return Turn(
        guest=guest, source=str(last.intent["from"]), target=str(last.intent["to"]),
        begins=begins, ends=ends, active=under and operation.active, tries=len(attempts),
        state="interrupted" if under and not operation.active else _STEPS.get(last.state, "failed"),
    )  # fmt: skip


def _seconds(value: float | None) -> float | None:
    return None if value is None else value / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The number of moves in each state."""

    arrived: int
    moving: int
    waiting: int
    failed: int

    @property
    def done(self) -> float:
        every = self.arrived + self.moving + self.waiting + self.failed
        return self.arrived / every if every else 1.0


def summary(found: Sequence[Turn]) -> Summary:
    """Count the moves by state."""
    arrived = sum(one.state == COMPLETED for one in found)
    waiting = sum(one.state in (WAITS, State.WAITING) for one in found)
    moving = sum(one.active and one.state != State.WAITING for one in found)
    return Summary(
        arrived=arrived, moving=moving, waiting=waiting,
        failed=len(found) - arrived - moving - waiting,
    )  # fmt: skip
