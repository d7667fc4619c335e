"""Build the report of a plan and of its execution. Pure."""

from dataclasses import replace
from typing import Any

from vmckpt.errors import at_host
from vmckpt.migration.forecast import service
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.plan.storage_cleanup import Tidied
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import Setting
from vmckpt.migration.run.engine import Ending
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import JobTotals, Outcome
from vmckpt.units import Bytes, Seconds

_NOTHING = Seconds(0.0)


def not_begun(plan: Plan, setting: Setting, guest: str) -> MigrationReport:
    """Build the report of a plan that was not carried out.

    `guest`: the requested name or UUID, which is used if the guest was not found.
    """
    return MigrationReport(
        guest=plan.facts.guest.name if plan.facts.guest is not None else guest,
        source=setting.source.name,
        target=setting.target.name,
        outcome=Outcome.BLOCKED if plan.blocked else Outcome.PLANNED,
        driver=None,
        began=_NOTHING,
        elapsed=_NOTHING,
        totals=None,
        observed_downtime=None,
        warnings=_warnings(plan.findings),
        findings=plan.findings,
        policy=plan.policy.name if plan.policy is not None else None,
        mode=plan.mode if plan.policy is not None else None,
        limit=plan.policy.limits.bandwidth if plan.policy is not None else None,
    )


def carried_out(
    begun: MigrationReport,
    plan: Plan,
    ending: Ending,
    observed: Seconds | None,
    tidied: Tidied,
) -> MigrationReport:
    """Build the report of an attempt from `begun`, the report of its plan."""
    left = tuple(path for path in plan.copies.left_behind if path not in tidied.removed)
    return replace(
        begun,
        outcome=ending.outcome,
        driver=ending.driver,
        began=ending.began,
        elapsed=ending.elapsed,
        totals=_with_disks(ending.totals, plan.copies.travels),
        observed_downtime=observed,
        samples=ending.samples,
        decisions=ending.decisions,
        warnings=(*begun.warnings, *ending.warnings, *tidied.troubles, *tidied.stays),
        error=ending.error,
        refused=ending.refused,
        switched=ending.switched,
        switchover=ending.switchover,
        forecast=_beside(plan, ending),
        left_behind=left if ending.outcome is Outcome.COMPLETED else (),
        removed=tidied.removed,
        stays=tidied.stays,
    )


def _with_disks(totals: JobTotals | None, disks: Bytes) -> JobTotals | None:
    """Return the final statistics with the bytes of copied disks, which libvirt leaves out."""
    if totals is None:
        return None
    return replace(totals, transferred=Bytes(totals.transferred + disks))


def _beside(plan: Plan, ending: Ending) -> dict[str, Any] | None:
    """Return the forecast with its score against the measured values; None without a forecast."""
    if plan.outlook is None:
        return None
    told = plan.outlook.as_json(plan.mode)
    return {**told, "score": service.score(plan.outlook, plan.mode, ending)}


def _warnings(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return tuple(at_host(f.where, f.text) for f in findings if f.severity is Severity.WARNING)
