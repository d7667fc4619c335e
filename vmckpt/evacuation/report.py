"""Report the result of a run, for display and as JSON. Pure."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vmckpt.evacuation.interfaces import Arrived, Moved, MoveEnd
from vmckpt.evacuation.plan.fleet import Tenant
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.task import Task
from vmckpt.journal.records import Operation
from vmckpt.migration.report import MigrationReport
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import FailureSide, Outcome
from vmckpt.protection.steps import READY
from vmckpt.units import Bytes, Seconds

_GUEST = (Outcome.NOT_CONVERGED, Outcome.TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """A guest on another host whose standby was to be moved, but was lost."""

    guest: str
    uuid: str
    hint: str
    """The command, or the two commands, that protect the guest again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a run."""

    task: Task
    job: str | None
    ended: MoveEnd
    earlier: tuple[Arrived, ...] = ()
    """Guests that an earlier controller of the job moved."""
    shut_down: tuple[str, ...] = ()
    """UUIDs of guests that were shut down or suspended, including by earlier controllers."""
    suspended: frozenset[str] = frozenset()
    """UUIDs of the guests in `shut_down` whose memory was saved."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names of guests that were moved, shut down or suspended, by UUID."""
    started: tuple[str, ...] = ()
    """Names of guests that were started again."""
    bare: tuple[Bare, ...] = ()

    @property
    def arrived(self) -> tuple[Arrived, ...]:
        """All guests that were moved, in the order of their moves."""
        mine = {(one.uuid, one.target) for one in self.ended.arrived}
        before = [one for one in self.earlier if (one.uuid, one.target) not in mine]
        return (*before, *self.ended.arrived)

    @property
    def comes_back(self) -> bool:
        """Whether a guest was moved, shut down or suspended, so that repopulate may be needed."""
        return bool(self.shut_down) or any(not one.standby for one in self.arrived)

    @property
    def outcome(self) -> Outcome:
        if not (self.ended.left or self.bare):
            return Outcome.COMPLETED
        return Outcome.CANCELLED if self.ended.stopped else Outcome.FAILED

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON data, with times in milliseconds."""
        return {
            "job": self.job, "kind": str(self.task.kind), "host": self.task.host,
            "outcome": str(self.outcome),
            "moved": [
                {
                    "guest": one.guest, "guest_uuid": one.uuid, "from": one.source,
                    "to": one.target, "job": one.job, "took_ms": _ms(one.took),
                    "downtime_ms": None if one.downtime is None else _ms(one.downtime),
                    "standby": one.standby,
                }
                for one in self.arrived
            ],
            "shut_down": list(self.shut_down), "suspended": sorted(self.suspended),
            "started": list(self.started),
            "unprotected": [
                {"guest": one.guest, "guest_uuid": one.uuid, "hint": one.hint, "mend": one.hint}
                for one in self.bare
            ],
            "left": [
                {"guest": one.tenant.name, "on": one.tenant.host, "why": one.why,
                 "hint": one.hint, "mend": one.hint}
                for one in self.ended.left
            ],
            "stopped": self.ended.stopped, "total_ms": _ms(self.ended.took),
        }  # fmt: skip


def _ms(seconds: Seconds) -> float:
    return round(seconds * 1000, 1)


def judged(report: MigrationReport, job_hint: str) -> Moved:
    """Convert the report of one migration into the result of a move.

    `job_hint`: name of the job in the hint if the report contains no job ID.
    """
    outcome, why = report.outcome, _why(report)
    downtime = None if report.totals is None else report.totals.downtime
    if outcome is Outcome.COMPLETED:
        return Moved(good=True, job=report.job, took=report.total, downtime=downtime)
    if outcome is Outcome.FAILED and report.refused is FailureSide.GUEST:
        return Moved(
            good=False, why=why, final="fix the reason, then run the command again", job=report.job
        )
    against = _against(report)
    if outcome is Outcome.BLOCKED and against and against[0].where != report.target:
        return Moved(good=False, why=why, blame=FailureSide.GUEST, job=report.job)
    if outcome in (Outcome.FAILED, Outcome.BLOCKED):
        return Moved(good=False, why=why, blame=FailureSide.TARGET, job=report.job)
    if outcome in _GUEST:
        return Moved(good=False, why=why, blame=FailureSide.GUEST, job=report.job)
    if outcome is Outcome.SHUT_OFF:
        return Moved(
            good=False, why="it was shut off during the move", final="no action needed",
            job=report.job,
        )  # fmt: skip
    hint = f"see vmckpt job {report.job or job_hint}"
    if outcome is Outcome.UNKNOWN:
        hint = "run vmckpt recover"
    return Moved(good=False, why=why, final=hint, job=report.job)


def _why(report: MigrationReport) -> str:
    if report.outcome is Outcome.BLOCKED and (blockers := _against(report)):
        return f"{blockers[0].where}: {blockers[0].text}"
    return report.error or (report.warnings[-1] if report.warnings else str(report.outcome))


def _against(report: MigrationReport) -> list[Finding]:
    return [one for one in report.findings if one.severity is Severity.BLOCKER]


def off(guest: str, host: str, why: str) -> Unplaced:
    """Return the entry for a guest that should have been started again but was not.

    `guest`, `host`: names; `why`: why it was not started.
    """
    tenant = Tenant(name=guest, host=host, memory=Bytes(0), cpus=0.0)
    return Unplaced(
        tenant=tenant, why=f"not started: {why}", hint=f"run virsh start {guest} on {host}"
    )


def arrived_of(operation: Operation, stay: Container[str]) -> Arrived | None:
    """Return the guest that one part of the job moved; None if that part moved no guest.

    `stay`: names of the guests that did not move. A guest that is not in `stay` has moved even if
    the outcome of its migration is unknown.
    """
    uuid, outcome = operation.guest_uuid, operation.outcome
    gone = outcome == Outcome.UNKNOWN and operation.guest not in stay and uuid not in stay
    if uuid is None or not (gone or outcome == Outcome.COMPLETED):
        return None
    told: Mapping[str, Any] = operation.report or {}
    downtime = told.get("downtime_ms")
    ended = operation.ended_at or operation.began_at
    return Arrived(
        guest=operation.guest, uuid=uuid, source=operation.source or "",
        target=operation.target or "", job=operation.id,
        took=Seconds(float(told.get("total_ms") or (ended - operation.began_at) * 1000) / 1000),
        downtime=None if downtime is None else Seconds(float(downtime) / 1000),
    )  # fmt: skip


def stepped(intents: Iterable[Mapping[str, Any]], stay: Container[str]) -> list[Arrived]:
    """Return the guests that were moved by steps of the job itself, each with its last target.

    `stay`: names, as in the plan, of the guests that did not move.
    """
    last = {str(one["uuid"]): one for one in intents}
    return [_stepped(one) for one in last.values() if one.get("called", one["guest"]) not in stay]


def _stepped(intent: Mapping[str, Any], *, standby: bool = False) -> Arrived:
    return Arrived(
        guest=str(intent["guest"]), uuid=str(intent["uuid"]), source=str(intent["from"]),
        target=str(intent["to"]), job=None, took=Seconds(0.0), downtime=None, standby=standby,
    )  # fmt: skip


def standbys(
    intents: Iterable[Mapping[str, Any]], protections: Sequence[Operation]
) -> tuple[tuple[Arrived, ...], tuple[Bare, ...]]:
    """Return the standbys that moved, and the guests that lost their standby.

    `protections`: all active protections. A protection that is not ready, or whose standby is still
    on the emptied host, is incomplete and does not count.
    """
    wait, bare = [], []
    for uuid, intent in {str(one["uuid"]): one for one in intents}.items():  # the last attempts
        active = [one for one in protections if one.guest_uuid == uuid]
        if any(one.target != intent["from"] and one.phase == READY for one in active):
            wait.append(_stepped(intent, standby=True))
            continue
        guest, command = str(intent["guest"]), str(intent["command"])
        hint = f"vmckpt unprotect {guest}, then {command}" if active else command
        bare.append(Bare(guest=guest, uuid=uuid, hint=hint))
    return tuple(wait), tuple(bare)
