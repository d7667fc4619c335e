"""Determine the state of a migration after its controller died, and how to recover it. Pure.

The decision depends on the journal, which shows whether libvirt was given the order, and on what
each host reports now. The table in docs/recovery.md is generated from this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.guest import Presence
from vmckpt.model.migration import Outcome


class HostView(StrEnum):
    """What a host reports about the guest."""

    SILENT = "does not answer"
    NONE = "no process"
    RUNS = "runs"
    MOVING = "migration job"
    HELD = "paused by the migration"
    PAUSED = "paused for another reason"
    IN_TWO = "post-copy"


class RecoveryAction(StrEnum):
    """An action of recovery. Actions are carried out in this order."""

    ADOPT = "watch the migration until it ends, under its policy"
    RESUME = "complete post-copy"
    END_TARGET = "destroy the copy on the target, which never ran"
    END_SOURCE = "destroy the paused copy on the source"
    START_SOURCE = "resume the guest on the source"
    UNDO = "undo the preparations for the move"
    FINISH = "complete the steps after the switchover"


STAYS = (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.NOT_CONVERGED, Outcome.FAILED)
"""Outcomes after which the guest stays on the source and all changes for the move are undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """The state of a migration and what to do about it."""

    truth: str
    outcome: Outcome | None
    """How the migration ended; None if it has not ended or the outcome is unknown."""
    acts: tuple[RecoveryAction, ...] = ()
    settle: str = ""
    """What the operator can do; shown when vmckpt must not act."""
    if_it_stays: bool = False
    """Whether to act only once the answers have stayed the same for PATIENCE: they also occur
    briefly during a transition.
    """

    @property
    def known(self) -> bool:
        return self.outcome is not None or bool(self.acts)


def host_view(presence: Presence) -> HostView:
    """Return a summary of what one host reports."""
    if not presence.reachable:
        return HostView.SILENT
    if presence.state is None or not presence.state.is_active:
        return HostView.NONE
    if presence.post_copy:
        return HostView.IN_TWO
    if presence.migrating:
        return HostView.MOVING
    if presence.held:
        return HostView.HELD
    return HostView.RUNS if presence.runs else HostView.PAUSED


NEVER = RecoveryDecision(
    truth="the guest had not begun to move", outcome=Outcome.FAILED, acts=(RecoveryAction.UNDO,)
)
_STAYED = RecoveryDecision(
    truth="the guest never left the source", outcome=Outcome.FAILED, acts=(RecoveryAction.UNDO,)
)
_NEVER_SENT = RecoveryDecision(
    truth="the guest is running on the source; the target does not answer, but never received all"
    " of the guest's memory",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.UNDO,),
    if_it_stays=True,
)
_TWO = RecoveryDecision(
    truth="both hosts have a copy of the guest that may be running",
    outcome=None,
    settle="find out which copy is correct, then destroy the other with virsh destroy GUEST",
)
_ARRIVED = RecoveryDecision(
    truth="the guest is running on the target",
    outcome=Outcome.COMPLETED,
    acts=(RecoveryAction.FINISH,),
)
_HANDED_OVER = RecoveryDecision(
    truth="the guest is running on the target, and the source still has a paused copy",
    outcome=Outcome.COMPLETED,
    acts=(RecoveryAction.END_SOURCE, RecoveryAction.FINISH),
)
_STRANDED = RecoveryDecision(
    truth="the migration left the guest paused on the source, and no copy is running",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.START_SOURCE, RecoveryAction.UNDO),
)
OLDER = RecoveryDecision(
    truth="the target received the entire guest, but its process there is gone: the paused copy on"
    " the source may be older than the guest's disks and must not be resumed",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_BOTH_STAND = RecoveryDecision(
    truth="the migration left the guest paused on the source; the copy on the target never ran",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.END_TARGET, RecoveryAction.START_SOURCE, RecoveryAction.UNDO),
)
_LEFTOVER = RecoveryDecision(
    truth="the guest is running on the source; the copy on the target never ran",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.END_TARGET, RecoveryAction.UNDO),
)
_ENDED = RecoveryDecision(
    truth="the guest is not running on either host: it stopped meanwhile", outcome=Outcome.SHUT_OFF
)
_LOST = RecoveryDecision(
    truth="the guest was lost on the target during post-copy", outcome=Outcome.LOST
)
_LOST_BEHIND = RecoveryDecision(
    truth="during post-copy, the source lost its part of the guest, which the target needs",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_MOVES = RecoveryDecision(
    truth="the migration is still running in libvirt",
    outcome=None,
    acts=(RecoveryAction.ADOPT,),
)
_IN_TWO = RecoveryDecision(
    truth="the guest is in post-copy, and each host has part of its memory",
    outcome=None,
    acts=(RecoveryAction.RESUME,),
)


def after(outcome: Outcome) -> tuple[RecoveryAction, ...]:
    """Return what remains to be done after an adopted migration has ended with `outcome`."""
    if outcome is Outcome.COMPLETED:
        return (RecoveryAction.FINISH,)
    return (RecoveryAction.UNDO,) if outcome in STAYS else ()


def decide(
    source: Presence,
    target: Presence,
    *,
    ordered: bool,
    paused_by_us: bool,
    elsewhere: Sequence[str] = (),
    may_have_run: bool = False,
    sent_all: bool = True,
) -> RecoveryDecision:
    """Determine the state of the migration and what to do about it.

    `ordered`: the journal has the intent to give libvirt the order. `paused_by_us`: the journal has
    the intent to pause the guest for the migration. `elsewhere`: other hosts that have a process of
    the guest, because an operator moved it by hand. `may_have_run`: the target received the entire
    guest, and the guest may have run there before its process disappeared. `sent_all`: the source
    may have sent the entire guest; this matters only if the guest is running on the source
    and the target does not answer.
    """
    here, there = host_view(source), host_view(target)
    if here is HostView.PAUSED and paused_by_us:
        here = HostView.HELD
    if HostView.SILENT in (here, there):
        if here is HostView.RUNS and not (ordered and sent_all):
            return _NEVER_SENT if ordered else NEVER
        return _one_silent(here, there)
    if not ordered:
        # Whatever happens to the guest now is not part of this migration.
        return NEVER
    if elsewhere:
        return _moved_on(here, there, elsewhere)
    if here is HostView.MOVING:
        return _MOVES
    if here is HostView.IN_TWO:
        return _LOST if there is HostView.NONE else _IN_TWO
    if may_have_run and (here, there) == (HostView.HELD, HostView.NONE):
        return OLDER
    return _TABLE.get((here, there), ODD)


def _moved_on(here: HostView, there: HostView, elsewhere: Sequence[str]) -> RecoveryDecision:
    where = " and ".join(elsewhere)
    if here is there is HostView.NONE:
        return RecoveryDecision(truth=f"the guest is now on {where}", outcome=Outcome.COMPLETED)
    return RecoveryDecision(
        truth=f"there is also a copy of the guest on {where}",
        outcome=None,
        settle="find out which copy is correct, then destroy the others with virsh destroy GUEST",
    )


def _one_silent(here: HostView, there: HostView) -> RecoveryDecision:
    if here is HostView.SILENT:
        both = there is HostView.SILENT
        return RecoveryDecision(
            truth="neither host answers" if both else "the source does not answer",
            outcome=None,
            settle=f"fix the {'hosts' if both else 'source'} or {'their' if both else 'its'}"
            " network, then run vmckpt recover",
        )
    stands = here is HostView.HELD
    return RecoveryDecision(
        truth="the migration left the guest paused on the source; the target, where it may be"
        " running, does not answer"
        if stands
        else "the target does not answer",
        outcome=None,
        settle="fix the target or its network, then run vmckpt recover"
        + (
            "; if the target is certain to be off, run virsh resume GUEST on the source"
            if stands
            else ""
        ),
    )


ODD = RecoveryDecision(
    truth="the reports of the two hosts are inconsistent",
    outcome=None,
    settle="the migration may be in transition: run vmckpt recover again in a minute; if the result"
    " is the same, check both hosts with virsh before you destroy a copy",
)
_TABLE = {
    (HostView.NONE, HostView.NONE): _ENDED,
    (HostView.NONE, HostView.RUNS): _ARRIVED,
    (HostView.NONE, HostView.PAUSED): RecoveryDecision(
        truth="the guest is paused on the target",
        outcome=Outcome.COMPLETED,
        acts=(RecoveryAction.FINISH,),
    ),
    (HostView.NONE, HostView.IN_TWO): _LOST_BEHIND,
    (HostView.RUNS, HostView.NONE): _STAYED,
    (HostView.RUNS, HostView.HELD): _LEFTOVER,
    (HostView.RUNS, HostView.RUNS): _TWO,
    (HostView.RUNS, HostView.PAUSED): _TWO,
    (HostView.RUNS, HostView.IN_TWO): _TWO,
    (HostView.HELD, HostView.NONE): _STRANDED,
    (HostView.HELD, HostView.RUNS): _HANDED_OVER,
    (HostView.HELD, HostView.HELD): _BOTH_STAND,
    (HostView.PAUSED, HostView.NONE): RecoveryDecision(
        truth="the guest never left the source, where it is paused",
        outcome=Outcome.FAILED,
        acts=(RecoveryAction.UNDO,),
    ),
    (HostView.PAUSED, HostView.HELD): RecoveryDecision(
        truth="the guest is paused on the source; the copy on the target never ran",
        outcome=Outcome.FAILED,
        acts=(RecoveryAction.END_TARGET, RecoveryAction.UNDO),
    ),
    (HostView.PAUSED, HostView.RUNS): _TWO,
}
