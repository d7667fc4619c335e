"""Determine how a migration ended, from what both hosts report. Pure."""

from dataclasses import dataclass

from vmckpt.migration.run.actions import Stop
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.migration import Outcome

_WHY = {
    Stop.OPERATOR: Outcome.CANCELLED,
    Stop.TIME_LIMIT: Outcome.TIMED_OUT,
    Stop.RULE: Outcome.NOT_CONVERGED,
}


def settle(source: Presence, target: Presence, *, stopped: Stop | None) -> Outcome | None:
    """Return a migration's outcome from what both hosts report; None: query the hosts again.

    `stopped`: why the engine aborted the migration; None if it did not. The result of
    libvirt's call is not used: a failed or interrupted call does not show where the guest is
    running.

    | source              | target       | outcome                                          |
    |---------------------|--------------|--------------------------------------------------|
    | gone or shut off    | runs, or was | completed                                        |
    |                     | paused there |                                                  |
    | runs, no job        | gone or off  | cancelled, timed out, not converged or failed    |
    | runs, never stopped | unreachable  | the same: the target cannot have the full guest  |
    | gone or shut off    | gone or off  | shut off during the migration, or right after it |
    | in post-copy        | gone or off  | lost: the target had part of the guest's memory  |
    | anything else       |              | not known: query again                           |

    A guest that was paused for the switchover and resumed on the source, while the target does not
    answer, is in the last row: libvirt also resumes it if only the target's answer was lost.
    """
    if source.post_copy:
        return Outcome.LOST if _off(target) else None
    if _off(source):
        paused = target.state is GuestState.PAUSED and not (target.held or target.migrating)
        if (target.runs or paused) and not target.post_copy:
            return Outcome.COMPLETED
        return Outcome.SHUT_OFF if _off(target) else None
    never_left = _off(target) or (not target.reachable and not source.resumed)
    if source.runs and not source.migrating and never_left:
        return _WHY[stopped] if stopped is not None else Outcome.FAILED
    return None


def lost_behind(source: Presence, target: Presence) -> bool:
    """Return whether the source lost memory that the target needs, provided the answers persist.

    The hosts briefly report the same at the end of every post-copy.
    """
    return _off(source) and target.post_copy


def _off(presence: Presence) -> bool:
    """Return whether the host answers and has no QEMU process of the guest."""
    return presence.reachable and (presence.state is None or not presence.state.is_active)


@dataclass(frozen=True, slots=True)
class PassCounter:
    """Counts passes over memory from 1, even if QEMU's counter continues from a cancelled job.

    The first reading of a job is taken while the target's QEMU is still starting, so the counter
    then belongs to an earlier job.
    """

    offset: int | None = None

    def after(self, reading: int) -> "PassCounter":
        """Return the counter to use from this reading onwards.

        A lower reading shows that QEMU reset its counter.
        """
        if self.offset is None:
            return PassCounter(reading)
        return PassCounter(0) if reading < self.offset else self

    def number(self, reading: int) -> int:
        return max(0, reading - (self.offset or 0))
