"""Decide what is true of a migration after its controller died, and how to recover it. Pure.

The journal (whether libvirt was ever given the order) and what each host reports now decide it. The
table in docs/recovery.md is generated from this module.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.guest import Presence
from vmckpt.model.migration import Outcome


class HostView(StrEnum):
    """What a host reports of the guest, in a word."""

    SILENT = "does not answer"
    NONE = "no process"
    RUNS = "runs"
    MOVING = "migration job"
    HELD = "stands for the migration"
    PAUSED = "paused otherwise"
    IN_TWO = "post-copy"


class RecoveryAction(StrEnum):
    """What recovery can do, in this order."""

    ADOPT = "watch it to its end under its policy"
    RESUME = "bring its post-copy to an end"
    END_TARGET = "end the copy on the target that never ran"
    END_SOURCE = "end the copy on the source that was handed over"
    START_SOURCE = "let the guest go on, on the source"
    UNDO = "put back what was set and made for the move"
    FINISH = "finish what follows an arrival"


STAYS = (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.NOT_CONVERGED, Outcome.FAILED)
"""Outcomes with the guest on the source: what was made and set for the move is undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """What is true of a migration and what to do about it."""

    truth: str
    outcome: Outcome | None
    """How the migration ended; None if it has not, or that is not known."""
    acts: tuple[RecoveryAction, ...] = ()
    settle: str = ""
    """What the operator can do; shown when vmckpt may not do anything."""
    if_it_stays: bool = False
    """The same answers also occur for a moment in a transition, so they must persist."""

    @property
    def known(self) -> bool:
        return self.outcome is not None or bool(self.acts)


def host_view(presence: Presence) -> HostView:
    """Return what one host reports, in a word."""
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
    truth="the guest runs on the source; the target does not answer, but never had all of its"
    " memory",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.UNDO,),
    if_it_stays=True,
)
_TWO = RecoveryDecision(
    truth="both hosts have a copy that may run",
    outcome=None,
    settle="find out which copy is right, then end the other with virsh destroy",
)
_ARRIVED = RecoveryDecision(
    truth="the guest runs on the target", outcome=Outcome.COMPLETED, acts=(RecoveryAction.FINISH,)
)
_HANDED_OVER = RecoveryDecision(
    truth="the guest runs on the target, and the source keeps a paused copy",
    outcome=Outcome.COMPLETED,
    acts=(RecoveryAction.END_SOURCE, RecoveryAction.FINISH),
)
_STRANDED = RecoveryDecision(
    truth="the migration left the guest paused on the source, and no copy runs",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.START_SOURCE, RecoveryAction.UNDO),
)
OLDER = RecoveryDecision(
    truth="the target died after it had all of the guest: the paused copy on the source may be"
    " older than its disks and must not be resumed",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_BOTH_STAND = RecoveryDecision(
    truth="the migration left the guest paused on the source, beside a copy that never ran",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.END_TARGET, RecoveryAction.START_SOURCE, RecoveryAction.UNDO),
)
_LEFTOVER = RecoveryDecision(
    truth="the guest runs on the source, beside a copy that never ran",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.END_TARGET, RecoveryAction.UNDO),
)
_ENDED = RecoveryDecision(
    truth="the guest runs nowhere: it ended meanwhile", outcome=Outcome.SHUT_OFF
)
_LOST = RecoveryDecision(
    truth="the guest was lost on the target during post-copy", outcome=Outcome.LOST
)
_LOST_BEHIND = RecoveryDecision(
    truth="the guest ended on the source during post-copy, with memory that the target needs",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_MOVES = RecoveryDecision(
    truth="the migration still runs in libvirt", outcome=None, acts=(RecoveryAction.ADOPT,)
)
_IN_TWO = RecoveryDecision(
    truth="the guest is in post-copy, in two parts", outcome=None, acts=(RecoveryAction.RESUME,)
)


def after(outcome: Outcome) -> tuple[RecoveryAction, ...]:
    """Return what remains to be done when an adopted migration has ended with `outcome`."""
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
    """Decide what is true and what to do.

    `ordered`: the journal has the intent to give libvirt the order. `paused_by_us`: the journal has
    the intent to pause the guest for the migration. `elsewhere`: other hosts that have a process of
    the guest, because it was moved on by hand. `may_have_run`: the target had all of the guest, and
    nothing proves that the guest did not run there before its process went away. `sent_all`: if the
    guest runs on the source, QEMU there does not deny that it has sent all of it.
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
        settle="find out which copy is right, then end the others with virsh destroy",
    )


def _one_silent(here: HostView, there: HostView) -> RecoveryDecision:
    if here is HostView.SILENT:
        both = there is HostView.SILENT
        return RecoveryDecision(
            truth="neither host answers" if both else "the source does not answer",
            outcome=None,
            settle="fix the host or its network, then run vmckpt recover",
        )
    stands = here is HostView.HELD
    return RecoveryDecision(
        truth="the migration left the guest paused on the source; the target, which may run it,"
        " does not answer"
        if stands
        else "the target does not answer",
        outcome=None,
        settle="fix the target or its network, then run vmckpt recover"
        + (
            "; if the target is certain to be off, run virsh resume on the source" if stands else ""
        ),
    )


ODD = RecoveryDecision(
    truth="the answers of the hosts do not fit together",
    outcome=None,
    settle="it may be in transition: run vmckpt recover again in a minute; if the result is the"
    " same, check both hosts with virsh before you end anything",
)
_TABLE = {
    (HostView.NONE, HostView.NONE): _ENDED,
    (HostView.NONE, HostView.RUNS): _ARRIVED,
    (HostView.NONE, HostView.PAUSED): RecoveryDecision(
        truth="the guest is on the target, and paused there",
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
        truth="the guest never left the source, and is paused there",
        outcome=Outcome.FAILED,
        acts=(RecoveryAction.UNDO,),
    ),
    (HostView.PAUSED, HostView.HELD): RecoveryDecision(
        truth="the guest is paused on the source, beside a copy that never ran",
        outcome=Outcome.FAILED,
        acts=(RecoveryAction.END_TARGET, RecoveryAction.UNDO),
    ),
    (HostView.PAUSED, HostView.RUNS): _TWO,
}
