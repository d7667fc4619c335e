"""After a controller's death: what is true of a migration, and what puts it in order. Pure.

What the journal has (whether libvirt was ever given the order) and what each host says now settle
it; docs/recovery.md is made from this table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vmckpt.model.guest import Presence
from vmckpt.model.migration import Outcome


class Seen(StrEnum):
    """What a host says of the guest, in a word."""

    SILENT = "does not answer"
    NONE = "no process"
    RUNS = "runs"
    MOVING = "migration job"
    HELD = "stands for the migration"
    PAUSED = "paused otherwise"
    IN_TWO = "post-copy"


class Act(StrEnum):
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
class Verdict:
    """What is true and what to do."""

    truth: str
    outcome: Outcome | None
    """How it has ended; None: it has not, or it is not known."""
    acts: tuple[Act, ...] = ()
    settle: str = ""
    """What would settle it; said when nothing may be done."""
    if_it_stays: bool = False
    """For a moment it also looks so on the way to something else."""

    @property
    def known(self) -> bool:
        return self.outcome is not None or bool(self.acts)


def seen(presence: Presence) -> Seen:
    """One host's answer in a word."""
    if not presence.reachable:
        return Seen.SILENT
    if presence.state is None or not presence.state.is_active:
        return Seen.NONE
    if presence.post_copy:
        return Seen.IN_TWO
    if presence.migrating:
        return Seen.MOVING
    if presence.held:
        return Seen.HELD
    return Seen.RUNS if presence.runs else Seen.PAUSED


NEVER = Verdict(truth="it had not begun to move", outcome=Outcome.FAILED, acts=(Act.UNDO,))
_STAYED = Verdict(truth="it never left the source", outcome=Outcome.FAILED, acts=(Act.UNDO,))
_NEVER_SENT = Verdict(
    truth="it runs on the source, and the target, which does not answer, never had all of it",
    outcome=Outcome.FAILED,
    acts=(Act.UNDO,),
    if_it_stays=True,
)
_TWO = Verdict(
    truth="both hosts have a copy that may run",
    outcome=None,
    settle="find out which one is right, and end the other with virsh destroy",
)
_ARRIVED = Verdict(truth="it runs on the target", outcome=Outcome.COMPLETED, acts=(Act.FINISH,))
_HANDED_OVER = Verdict(
    truth="it runs on the target, and the source keeps a copy that stands still",
    outcome=Outcome.COMPLETED,
    acts=(Act.END_SOURCE, Act.FINISH),
)
_STRANDED = Verdict(
    truth="it stands still on the source, and no copy runs",
    outcome=Outcome.FAILED,
    acts=(Act.START_SOURCE, Act.UNDO),
)
OLDER = Verdict(
    truth="the target died after it had all of the guest: what stands still on the source may be"
    " older than its disks, and must not go on",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_BOTH_STAND = Verdict(
    truth="it stands still on the source, beside a copy that never ran",
    outcome=Outcome.FAILED,
    acts=(Act.END_TARGET, Act.START_SOURCE, Act.UNDO),
)
_LEFTOVER = Verdict(
    truth="it runs on the source, beside a copy that never ran",
    outcome=Outcome.FAILED,
    acts=(Act.END_TARGET, Act.UNDO),
)
_ENDED = Verdict(truth="it runs nowhere: it has ended meanwhile", outcome=Outcome.SHUT_OFF)
_LOST = Verdict(truth="the target has lost it in the middle of a post-copy", outcome=Outcome.LOST)
_LOST_BEHIND = Verdict(
    truth="the source has ended in the middle of a post-copy, with memory that the target needs",
    outcome=Outcome.LOST,
    if_it_stays=True,
)
_MOVES = Verdict(truth="the migration goes on in libvirt", outcome=None, acts=(Act.ADOPT,))
_IN_TWO = Verdict(truth="it is in two parts, in post-copy", outcome=None, acts=(Act.RESUME,))


def after(outcome: Outcome) -> tuple[Act, ...]:
    """What is left to do once a migration that went on has ended so."""
    if outcome is Outcome.COMPLETED:
        return (Act.FINISH,)
    return (Act.UNDO,) if outcome in STAYS else ()


def judge(
    source: Presence,
    target: Presence,
    *,
    ordered: bool,
    paused_by_us: bool,
    elsewhere: Sequence[str] = (),
    may_have_run: bool = False,
    sent_all: bool = True,
) -> Verdict:
    """What is true and what to do.

    `ordered`: the journal has the intent to give libvirt the order. `paused_by_us`: the journal has
    the intent to pause the guest for the migration. `elsewhere`: other hosts that have a process of
    the guest, because somebody moved it on by hand. `may_have_run`: the target had all of the
    guest, and nothing proves that it did not run it before its process went away. `sent_all`: of a
    guest that runs on the source, QEMU there does not deny that it has sent all of it.
    """
    here, there = seen(source), seen(target)
    if here is Seen.PAUSED and paused_by_us:
        here = Seen.HELD
    if Seen.SILENT in (here, there):
        if here is Seen.RUNS and not (ordered and sent_all):
            return _NEVER_SENT if ordered else NEVER
        return _one_silent(here, there)
    if not ordered:
        # Whatever happens to the guest now is somebody else's doing.
        return NEVER
    if elsewhere:
        return _moved_on(here, there, elsewhere)
    if here is Seen.MOVING:
        return _MOVES
    if here is Seen.IN_TWO:
        return _LOST if there is Seen.NONE else _IN_TWO
    if may_have_run and (here, there) == (Seen.HELD, Seen.NONE):
        return OLDER
    return _TABLE.get((here, there), ODD)


def _moved_on(here: Seen, there: Seen, elsewhere: Sequence[str]) -> Verdict:
    where = " and ".join(elsewhere)
    if here is there is Seen.NONE:
        return Verdict(truth=f"it is on {where} by now", outcome=Outcome.COMPLETED)
    return Verdict(
        truth=f"{where} has a copy of it too",
        outcome=None,
        settle="find out which one is right, and end the others with virsh destroy",
    )


def _one_silent(here: Seen, there: Seen) -> Verdict:
    if here is Seen.SILENT:
        both = there is Seen.SILENT
        return Verdict(
            truth="neither host answers" if both else "the source does not answer",
            outcome=None,
            settle="mend it or its network, then run vmckpt recover",
        )
    stands = here is Seen.HELD
    return Verdict(
        truth="it stands still on the source, and the target, which may run it, does not answer"
        if stands
        else "the target does not answer",
        outcome=None,
        settle="mend the target or its network, then run vmckpt recover"
        + ("; if the target is certain to be off, virsh resume on the source" if stands else ""),
    )


ODD = Verdict(
    truth="what the hosts say does not go together",
    outcome=None,
    settle="it may be on its way: run vmckpt recover again in a minute; if that says the same,"
    " look at both hosts with virsh before anything is ended",
)
_TABLE = {
    (Seen.NONE, Seen.NONE): _ENDED,
    (Seen.NONE, Seen.RUNS): _ARRIVED,
    (Seen.NONE, Seen.PAUSED): Verdict(
        truth="it is on the target, and paused there",
        outcome=Outcome.COMPLETED,
        acts=(Act.FINISH,),
    ),
    (Seen.NONE, Seen.IN_TWO): _LOST_BEHIND,
    (Seen.RUNS, Seen.NONE): _STAYED,
    (Seen.RUNS, Seen.HELD): _LEFTOVER,
    (Seen.RUNS, Seen.RUNS): _TWO,
    (Seen.RUNS, Seen.PAUSED): _TWO,
    (Seen.RUNS, Seen.IN_TWO): _TWO,
    (Seen.HELD, Seen.NONE): _STRANDED,
    (Seen.HELD, Seen.RUNS): _HANDED_OVER,
    (Seen.HELD, Seen.HELD): _BOTH_STAND,
    (Seen.PAUSED, Seen.NONE): Verdict(
        truth="it never left the source, and is paused there",
        outcome=Outcome.FAILED,
        acts=(Act.UNDO,),
    ),
    (Seen.PAUSED, Seen.HELD): Verdict(
        truth="it is paused on the source, beside a copy that never ran",
        outcome=Outcome.FAILED,
        acts=(Act.END_TARGET, Act.UNDO),
    ),
    (Seen.PAUSED, Seen.RUNS): _TWO,
}
