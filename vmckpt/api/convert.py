"""Convert results of `vmckpt.app` to those of the Python API."""

import math
from collections.abc import Mapping
from typing import Any

from vmckpt.api import results
from vmckpt.app.snapshot_store import SnapshotRow
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.plan.plan import Plan as EvacuationPlan
from vmckpt.evacuation.report import Report
from vmckpt.migration import report as reports
from vmckpt.migration.forecast.forecast import Forecast, Range
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.report import MigrationReport
from vmckpt.model.finding import Finding
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host, HostFacts
from vmckpt.protection import status
from vmckpt.protection.request import Protected
from vmckpt.protection.stop import StopResult
from vmckpt.snapshot.request import Restored, Taken
from vmckpt.store.format.metadata import Contents


def host(found: Host, facts: HostFacts | None, error: str | None) -> results.Host:
    """Convert a host and what its libvirt reported; `error`: why it did not answer."""
    known: dict[str, Any] = dict.fromkeys(("libvirt", "qemu", "cpus", "memory", "memory_free"))
    if facts is not None:
        known = {
            "libvirt": facts.libvirt_version, "qemu": facts.qemu_version, "cpus": facts.cpus,
            "memory": facts.memory, "memory_free": facts.memory_free,
        }  # fmt: skip
    return results.Host(
        name=found.name, uri=found.uri, labels=dict(found.labels), error=error, **known
    )


def guest(found: Guest, on: Host) -> results.Guest:
    """Convert a guest and its host."""
    return results.Guest(
        name=found.name, uuid=found.uuid, host=on.name, state=str(found.state),
        memory=found.memory, vcpus=found.vcpus, labels=dict(found.labels),
    )  # fmt: skip


def _finding(one: Finding) -> results.Finding:
    return results.Finding(
        code=one.code, severity=str(one.severity), where=one.where, text=one.text, hint=one.hint
    )


def _range(one: Range) -> results.Range:
    return results.Range(low=one.low, high=None if math.isinf(one.high) else one.high)


def _maybe(one: Range | None) -> results.Range | None:
    return None if one is None else _range(one)


def _forecast(one: Forecast) -> results.Forecast:
    told = one.shown()
    return results.Forecast(
        mode=str(told.mode), total=_maybe(told.total), downtime=_maybe(told.downtime),
        sent=_maybe(told.sent), converges=told.converges,
    )  # fmt: skip


def plan(made: Plan, source: Host, target: Host) -> results.Plan:
    """Convert the plan of a migration."""
    found, outlook = made.facts.guest, made.outlook
    return results.Plan(
        guest=made.facts.name if found is None else found.name,
        source=source.name, target=target.name, possible=not made.blocked,
        policy=None if made.policy is None else made.policy.name,
        mode=str(made.mode), reason=made.reason,
        findings=tuple(_finding(one) for one in made.findings),
        forecasts=() if outlook is None else tuple(_forecast(one) for one in outlook.forecasts),
    )  # fmt: skip


def migration(report: MigrationReport) -> results.Migration:
    """Convert the report of a migration that has completed."""
    return results.Migration(
        guest=report.guest, source=report.source, target=report.target, job=report.job,
        policy=report.policy, mode=None if report.mode is None else str(report.mode),
        took=report.total, downtime=report.downtime, sent=report.transferred,
        warnings=tuple(dict.fromkeys(report.warnings)), details=reports.as_json(report),
    )  # fmt: skip


def _remaining(one: Unplaced) -> results.Remaining:
    return results.Remaining(guest=one.tenant.name, why=one.why, hint=one.hint)


def evacuation_plan(made: EvacuationPlan) -> results.EvacuationPlan:
    """Convert the plan of an evacuation."""
    moves = []
    for one in made.going:
        check = made.check(one)
        shown = None if check is None else check.shown()
        moves.append(
            results.PlannedMove(
                guest=one.tenant.name, source=one.tenant.host, target=one.target, why=one.why,
                total=None if shown is None else _maybe(shown.total),
                downtime=None if shown is None else _maybe(shown.downtime),
            )
        )  # fmt: skip
    return results.EvacuationPlan(
        host=made.task.host, moves=tuple(moves),
        remaining=tuple(_remaining(one) for one in made.left),
        shut_down=tuple(one.name for one in made.shut_down),
        suspended=tuple(one.name for one in made.suspended),
        total=_range(made.shown_total()), details=made.as_json(),
    )  # fmt: skip


def evacuation(report: Report) -> results.Evacuation:
    """Convert the report of an evacuation; moved standbys are omitted."""
    moves = tuple(
        results.Move(
            guest=one.guest, source=one.source, target=one.target, job=one.job, took=one.took,
            downtime=one.downtime,
        )
        for one in report.arrived if not one.standby
    )  # fmt: skip
    return results.Evacuation(
        host=report.task.host, job=report.job, moves=moves,
        remaining=tuple(_remaining(one) for one in report.ended.left),
        unprotected=tuple(one.guest for one in report.bare),
        took=report.ended.took, details=report.as_json(),
    )  # fmt: skip


def snapshot(row: SnapshotRow) -> results.Snapshot:
    """Convert a row of a store's list."""
    names = ("name", "guest", "guest_uuid", "host", "made_at", "memory", "encrypted")
    known: dict[str, Any] = dict.fromkeys(names)
    if (public := row.public) is not None:
        known = {
            "name": public.name, "guest": public.guest, "guest_uuid": public.guest_uuid,
            "host": public.host, "made_at": public.made_at,
            "memory": public.contents is Contents.MEMORY,
            "encrypted": public.data_key_id is not None,
        }  # fmt: skip
    return results.Snapshot(
        id=row.id, pinned=row.pinned, trusted=row.trusted, intact=row.verdict.good,
        error=row.wrong, **known,
    )  # fmt: skip


def created(taken: Taken) -> results.CreatedSnapshot:
    """Convert a snapshot that was created."""
    return results.CreatedSnapshot(
        id=taken.id, name=taken.name, guest=taken.guest, host=taken.host, store=taken.store,
        job=taken.job, paused_for=taken.pause, took=taken.took, written=taken.written,
        encrypted=taken.encrypted, warnings=taken.warnings, details=taken.as_json(),
    )  # fmt: skip


def restored(done: Restored) -> results.Restored:
    """Convert a restore."""
    return results.Restored(
        snapshot=done.snapshot, guest=done.guest, host=done.host, job=done.job,
        started=done.runs, took=done.took, warnings=done.warnings, details=done.as_json(),
    )  # fmt: skip


def protected(done: Protected) -> results.Protected:
    """Convert a protection that was started."""
    return results.Protected(
        guest=done.guest, primary=done.primary, backup=done.backup, job=done.job,
        automatic=done.automatic, took=done.took, details=done.as_json(),
    )  # fmt: skip


def protection(entry: Mapping[str, Any]) -> results.Protection:
    """Convert an entry of `app.protection.status`."""
    seen = status.parse_status(entry)
    return results.Protection(
        guest=entry["guest"], uuid=entry["uuid"], primary=entry["primary"],
        backup=entry["backup"], job=entry["job"], phase=seen.phase, ready=seen.ready,
        why=seen.ready_why, behind=seen.behind_s, automatic=entry["automatic"], ended=seen.end,
        next_step=seen.next_step, details=entry,
    )  # fmt: skip


def ended(done: StopResult) -> results.Ended:
    """Convert the end of a protection."""
    return results.Ended(guest=done.guest, host=done.runs_on, why=done.why, took=done.took)
