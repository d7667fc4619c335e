"""What to do about a running migration now, and what became of it in the end. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.guests import Presence
from vmckpt.model.jobs import Outcome
from vmckpt.units import Seconds


class Stop(StrEnum):
    """Why a migration is being stopped."""

    OPERATOR = "operator"
    TIME_LIMIT = "time limit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the operator allowed."""

    max_downtime: Seconds
    timeout: Seconds | None
    """None: as long as it takes."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Go on."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the job; the guest stays on the source."""

    why: Stop
    reason: str


Action = Wait | Abort


def decide(limits: Limits, *, began: Seconds, now: Seconds, operator_stops: bool) -> Action:
    """Choose the next action; the first rule that matches wins."""
    if operator_stops:
        return Abort(Stop.OPERATOR, "the operator stopped it")
    if limits.timeout is not None and now - began >= limits.timeout:
        return Abort(Stop.TIME_LIMIT, f"not done within the time limit of {limits.timeout:g} s")
    return Wait()


def settle(source: Presence, target: Presence, *, stopped: Stop | None) -> Outcome | None:
    """What became of the migration, from what both hosts say; None: look again.

    libvirt's own answer is not used: a call that failed or broke says nothing about where the
    guest runs.

    | source              | target       | outcome                                          |
    |---------------------|--------------|--------------------------------------------------|
    | gone or shut off    | runs         | completed                                        |
    | runs, no job        | gone or off  | cancelled, timed out or failed: it never left    |
    | runs, never stopped | unreachable  | the same: the target can run only what left      |
    | gone or shut off    | gone or off  | shut off: it ended on the way, or right after    |
    | anything else       |              | look again                                       |

    A source that was stopped for the switchover and resumed, beside a silent target, is in the last
    row: libvirt resumes it also when only the target's answer got lost.
    """
    if _off(source):
        if target.runs:
            return Outcome.COMPLETED
        return Outcome.SHUT_OFF if _off(target) else None
    never_left = _off(target) or (not target.reachable and not source.resumed)
    if source.runs and not source.migrating and never_left:
        why = {Stop.OPERATOR: Outcome.CANCELLED, Stop.TIME_LIMIT: Outcome.TIMED_OUT}
        return why[stopped] if stopped is not None else Outcome.FAILED
    return None


def _off(presence: Presence) -> bool:
    """Whether the host answers and has no QEMU process of the guest."""
    return presence.reachable and (presence.state is None or not presence.state.is_active)


@dataclass(frozen=True, slots=True)
class PassCounter:
    """Counts passes over memory from 1, though QEMU's counter may go on from a cancelled job's.

    The first reading of a job is taken while the target's QEMU still starts: what the counter
    shows then belongs to an earlier job.
    """

    offset: int | None = None

    def after(self, reading: int) -> "PassCounter":
        """The counter to use from this reading on; one that falls was reset meanwhile."""
        if self.offset is None:
            return PassCounter(reading)
        return PassCounter(0) if reading < self.offset else self

    def number(self, reading: int) -> int:
        return max(0, reading - (self.offset or 0))
