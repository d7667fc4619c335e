"""After a controller's death: what is true of a migration, and what puts it in order. Pure.

What the journal has (whether libvirt was ever given the order) and what each host says now settle
it; docs/recovery.md is made from this table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.guest import Presence
from vmckpt.model.migration import Outcome


class HostView(StrEnum):
    """What a host says of the guest, in a word."""

    SILENT = "does not answer"
    NONE = "no process"
    RUNS = "runs"
    MOVING = "migration job"
    HELD = "stands for the migration"
    PAUSED = "paused otherwise"
    IN_TWO = "post-copy"


class RecoveryAction(StrEnum):
    """What there is to do, in this order."""

    ADOPT = "watch it to its end under its policy"
    RESUME = "bring its post-copy to an end"
    END_TARGET = "end the copy on the target that never ran"
    END_SOURCE = "end the copy on the source that was handed over"
    START_SOURCE = "let the guest go on, on the source"
    UNDO = "put back what was set and made for the move"
    FINISH = "finish what follows an arrival"


STAYS = (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.NOT_CONVERGED, Outcome.FAILED)
"""The guest runs on the source: what was made and set for the move is undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """What is true and what to do."""

    truth: str
    outcome: Outcome | None
    """How it has ended; None: it has not, or it is not known."""
    acts: tuple[RecoveryAction, ...] = ()
    settle: str = ""
    """What would settle it; said when nothing may be done."""
    if_it_stays: bool = False
    """For a moment it also looks so on the way to something else."""

    @property
    def known(self) -> bool:
        return self.outcome is not None or bool(self.acts)


def host_view(presence: Presence) -> HostView:
    """One host's answer in a word."""
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
    truth="it had not begun to move", outcome=Outcome.FAILED, acts=(RecoveryAction.UNDO,)
)
_STAYED = RecoveryDecision(
    truth="it never left the source", outcome=Outcome.FAILED, acts=(RecoveryAction.UNDO,)
)
_NEVER_SENT = RecoveryDecision(
    truth="it runs on the source, and the target, which does not answer, never had all of it",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.UNDO,),
    if_it_stays=True,
)
_TWO = RecoveryDecision(
    truth="both hosts have a copy that may run",
    outcome=None,
    settle="find out which one is right, and end the other with virsh destroy",
)
_ARRIVED = RecoveryDecision(
    truth="it runs on the target", outcome=Outcome.COMPLETED, acts=(RecoveryAction.FINISH,)
)
_HANDED_OVER = RecoveryDecision(
    truth="it runs on the target, and the source keeps a copy that stands still",
    outcome=Outcome.COMPLETED,
    acts=(RecoveryAction.END_SOURCE, RecoveryAction.FINISH),
)
_STRANDED = RecoveryDecision(
    truth="it stands still on the source, and no copy runs",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.START_SOURCE, RecoveryAction.UNDO),
)
OLDER = RecoveryDecision(
    truth="the target died after it had all of the guest: what stands still on the source may be"
    " older than its disks, and must not go on",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_BOTH_STAND = RecoveryDecision(
    truth="it stands still on the source, beside a copy that never ran",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.END_TARGET, RecoveryAction.START_SOURCE, RecoveryAction.UNDO),
)
_LEFTOVER = RecoveryDecision(
    truth="it runs on the source, beside a copy that never ran",
    outcome=Outcome.FAILED,
    acts=(RecoveryAction.END_TARGET, RecoveryAction.UNDO),
)
_ENDED = RecoveryDecision(truth="it runs nowhere: it has ended meanwhile", outcome=Outcome.SHUT_OFF)
_LOST = RecoveryDecision(
    truth="the target has lost it in the middle of a post-copy", outcome=Outcome.LOST
)
_LOST_BEHIND = RecoveryDecision(
    truth="the source has ended in the middle of a post-copy, with memory that the target needs",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_MOVES = RecoveryDecision(
    truth="the migration goes on in libvirt", outcome=None, acts=(RecoveryAction.ADOPT,)
)
_IN_TWO = RecoveryDecision(
    truth="it is in two parts, in post-copy", outcome=None, acts=(RecoveryAction.RESUME,)
)


def after(outcome: Outcome) -> tuple[RecoveryAction, ...]:
    """What is left to do once a migration that went on has ended so."""
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
    """What is true and what to do.

    `ordered`: the journal has the intent to give libvirt the order. `paused_by_us`: the journal has
    the intent to pause the guest for the migration. `elsewhere`: other hosts that have a process of
    the guest, because somebody moved it on by hand. `may_have_run`: the target had all of the
    guest, and nothing proves that it did not run it before its process went away. `sent_all`: of a
    guest that runs on the source, QEMU there does not deny that it has sent all of it.
    """
    here, there = host_view(source), host_view(target)
    if here is HostView.PAUSED and paused_by_us:
        here = HostView.HELD
    if HostView.SILENT in (here, there):
        if here is HostView.RUNS and not (ordered and sent_all):
            return _NEVER_SENT if ordered else NEVER
        return _one_silent(here, there)
    if not ordered:
        # Whatever happens to the guest now is somebody else's doing.
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
        return RecoveryDecision(truth=f"it is on {where} by now", outcome=Outcome.COMPLETED)
    return RecoveryDecision(
        truth=f"{where} has a copy of it too",
        outcome=None,
        settle="find out which one is right, and end the others with virsh destroy",
    )


def _one_silent(here: HostView, there: HostView) -> RecoveryDecision:
    if here is HostView.SILENT:
        both = there is HostView.SILENT
        return RecoveryDecision(
            truth="neither host answers" if both else "the source does not answer",
            outcome=None,
            settle="mend it or its network, then run vmckpt recover",
        )
    stands = here is HostView.HELD
    return RecoveryDecision(
        truth="it stands still on the source, and the target, which may run it, does not answer"
        if stands
        else "the target does not answer",
        outcome=None,
        settle="mend the target or its network, then run vmckpt recover"
        + ("; if the target is certain to be off, virsh resume on the source" if stands else ""),
    )


ODD = RecoveryDecision(
    truth="what the hosts say does not go together",
    outcome=None,
    settle="it may be on its way: run vmckpt recover again in a minute; if that says the same,"
    " look at both hosts with virsh before anything is ended",
)
_TABLE = {
    (HostView.NONE, HostView.NONE): _ENDED,
    (HostView.NONE, HostView.RUNS): _ARRIVED,
    (HostView.NONE, HostView.PAUSED): RecoveryDecision(
        truth="it is on the target, and paused there",
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
        truth="it never left the source, and is paused there",
        outcome=Outcome.FAILED,
        acts=(RecoveryAction.UNDO,),
    ),
    (HostView.PAUSED, HostView.HELD): RecoveryDecision(
        truth="it is paused on the source, beside a copy that never ran",
        outcome=Outcome.FAILED,
        acts=(RecoveryAction.END_TARGET, RecoveryAction.UNDO),
    ),
    (HostView.PAUSED, HostView.RUNS): _TWO,
}
