"""Hosts in maintenance. Maintenance is an operation that is active until an operator ends it.

Like an operation that is delegated to agents, maintenance needs no controller. So every controller
with the same journal sees the operation, which stays active when a controller exits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vmckpt.errors import BadInput, Blocked, JournalError
from vmckpt.journal import controller_identity, jobs, location
from vmckpt.journal.records import MAINTENANCE, NewOperation, Operation
from vmckpt.journal.systemd_log import SystemdLog
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
    """When the maintenance began, in seconds since 1970."""
    asked_by: str
    why: str

    @property
    def closed(self) -> str:
        """The reason why no guest is placed on the host."""
        said = f": {self.why}" if self.why else ""
        return f"it is in maintenance ({self.job}, {self.asked_by}{said})"


def _held(operation: Operation) -> Held:
    return Held(
        host=operation.source or operation.guest, job=operation.id, since=operation.began_at,
        asked_by=operation.asked_by, why=str(operation.detail.get("why") or ""),
    )  # fmt: skip


def held() -> Mapping[str, Held]:
    """Return all hosts in maintenance, by name; empty if there is no journal.

    Raises JournalError.
    """
    if not location.there(location.default()):
        return {}
    with jobs.open_journal() as journal:
        return _all(journal)


def _all(journal: "Journal") -> dict[str, Held]:
    return {one.host: one for one in reversed(_every(journal))}


def _every(journal: "Journal") -> list[Held]:
    """Return all maintenance operations, the oldest first."""
    return [_held(one) for one in journal.delegated_to_agents() if one.kind == MAINTENANCE]


def closed(host: str) -> str | None:
    """Return the reason why no guest may be placed on a host; None if guests are allowed.

    Also returns None if the journal cannot be read. Commands that record an operation report that
    error.
    """
    try:
        found = held().get(host)
    except JournalError:
        return None
    return None if found is None else found.closed


def refuse(host: str) -> None:
    """Raise Blocked if no guest may be placed on a host. Also raises JournalError."""
    if (why := closed(host)) is not None:
        raise Blocked(
            f"{host}: {why}; nothing was changed",
            host=host,
            hint=f"choose another host, or run vmckpt maintenance leave {host}",
        )


def enter(host: str, why: str) -> tuple[Held, bool]:
    """Put a host in maintenance. Does not change a host that is already in maintenance.

    Returns the record, and whether this call created it. Raises JournalError.
    """
    if location.default() == location.NONE:
        raise JournalError(
            "maintenance is recorded in the journal, but the journal is turned off",
            hint="name a journal with --journal or VMCKPT_JOURNAL",
        )
    with jobs.open_journal() as journal:
        if (already := _all(journal).get(host)) is not None:
            return already, False
        new = NewOperation(kind=MAINTENANCE, guest=host, source=host, detail={"why": why})
        id_ = journal.begin(new)
        journal.entrust(id_, "the journal")
        SystemdLog(id_, new).began(controller_identity.asked_by())
        return _held(journal.operation(id_)), True


def leave(host: str) -> Held:
    """End a host's maintenance. Returns the ended maintenance.

    Raises BadInput if the host is not in maintenance, and JournalError.
    """
    with jobs.open_journal() as journal:
        found = [one for one in _every(journal) if one.host == host]
        if not found:
            raise BadInput(f"{host} is not in maintenance", hint="run vmckpt maintenance list")
        for one in found:  # two controllers may have put the host in maintenance simultaneously
            journal.finish(one.job, Outcome.COMPLETED, {"ended_by": controller_identity.asked_by()})
            SystemdLog(one.job, journal.operation(one.job)).ended(Outcome.COMPLETED, None)
        return found[0]


async def settle(case: "OrphanedJob", policies: object) -> Settled:
    """Leave the host in maintenance, which only an operator ends. See recovery.Handler."""
    del policies
    if case.recorder is not None:
        case.recorder.entrust("the journal")
    found = _held(case.operation)
    return Settled(
        truth=f"{found.host} is in maintenance", outcome=None, goes_on=True,
        settle=f"run vmckpt maintenance leave {found.host} to end the maintenance",
    )  # fmt: skip
