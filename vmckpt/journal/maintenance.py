"""Which hosts are in maintenance: an operation in the journal that lasts until somebody ends it.

Nobody attends it, as nobody need: it is entrusted, as those are that agents go on with. So every
controller of the same journal sees it, and it outlives them all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vmckpt.errors import BadInput, Blocked, JournalError
from vmckpt.journal import controller_identity, jobs, location
from vmckpt.journal.records import MAINTENANCE, NewOperation, Operation
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled

if TYPE_CHECKING:
    from vmckpt.journal.recorder import OrphanedJob
    from vmckpt.journal.store import Journal


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A host in maintenance."""

    host: str
    job: str
    since: float
    """Seconds since 1970."""
    asked_by: str
    why: str

    @property
    def closed(self) -> str:
        """Why nothing is placed there."""
        said = f": {self.why}" if self.why else ""
        return f"it is in maintenance ({self.job}, {self.asked_by}{said})"


def _held(operation: Operation) -> Held:
    return Held(
        host=operation.source or operation.guest, job=operation.id, since=operation.began_at,
        asked_by=operation.asked_by, why=str(operation.detail.get("why") or ""),
    )  # fmt: skip


def held() -> Mapping[str, Held]:
    """All hosts in maintenance, by name; none without a journal. Raises JournalError."""
    if not location.there(location.default()):
        return {}
    with jobs.open_journal() as journal:
        return _all(journal)


def _all(journal: "Journal") -> dict[str, Held]:
    return {one.host: one for one in reversed(_every(journal))}


def _every(journal: "Journal") -> list[Held]:
    """The oldest first."""
    return [_held(one) for one in journal.delegated_to_agents() if one.kind == MAINTENANCE]


def closed(host: str) -> str | None:
    """Why nothing is placed on a host; None: it may be. A journal that cannot be read keeps nobody
    away: what is recorded there is told by whoever records."""
    try:
        found = held().get(host)
    except JournalError:
        return None
    return None if found is None else found.closed


def refuse(host: str) -> None:
    """Raise Blocked if nothing is placed on a host."""
    if (why := closed(host)) is not None:
        raise Blocked(
            f"{host}: {why}; nothing was changed",
            hint=f"choose another host, or vmckpt maintenance leave {host}",
        )


def enter(host: str, why: str) -> tuple[Held, bool]:
    """Put a host in maintenance; whether it was not before. Raises JournalError."""
    if location.default() == location.NONE:
        raise JournalError(
            "maintenance is kept in the journal, and there is none",
            hint="leave VMCKPT_JOURNAL=none out",
        )
    with jobs.open_journal() as journal:
        if (already := _all(journal).get(host)) is not None:
            return already, False
        new = NewOperation(kind=MAINTENANCE, guest=host, source=host, detail={"why": why})
        id_ = journal.begin(new)
        journal.entrust(id_, "the journal")
        return _held(journal.operation(id_)), True


def leave(host: str) -> Held:
    """End it. Raises BadInput if the host is in no maintenance."""
    with jobs.open_journal() as journal:
        found = [one for one in _every(journal) if one.host == host]
        if not found:
            raise BadInput(f"{host} is not in maintenance", hint="see vmckpt maintenance list")
        for one in found:  # two controllers may have put it there at once
            journal.finish(one.job, Outcome.COMPLETED, {"ended_by": controller_identity.asked_by()})
        return found[0]


async def settle(case: "OrphanedJob", policies: object) -> Settled:
    """See recovery.Handler: it is ended by a person, not by recovery."""
    del policies
    if case.recorder is not None:
        case.recorder.entrust("the journal")
    found = _held(case.operation)
    return Settled(
        truth=f"{found.host} is in maintenance", outcome=None, goes_on=True,
        settle=f"vmckpt maintenance leave {found.host} ends it",
    )  # fmt: skip
