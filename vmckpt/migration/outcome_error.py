"""The error for each outcome of a migration: what is known of the guest, and what to do. Pure."""

from collections.abc import Callable, Mapping

from vmckpt.errors import (
    Blocked,
    Cancelled,
    MigrationFailed,
    OutcomeUnknown,
    PostcopyPaused,
    VmckptError,
)
from vmckpt.migration.report import MigrationReport
from vmckpt.model.finding import Severity
from vmckpt.model.migration import Outcome
from vmckpt.units import show_count


def migration_error(report: MigrationReport) -> VmckptError | None:
    """Return the error for a migration's outcome; None if it completed or was only planned."""
    return _ERRORS[report.outcome](report)


def _well(_report: MigrationReport) -> None:
    return None


def _blocked(report: MigrationReport) -> VmckptError:
    count = sum(f.severity is Severity.BLOCKER for f in report.findings)
    return Blocked(
        f"{report.guest} cannot move from {report.source} to {report.target}:"
        f" {show_count(count, 'reason')}",
        hint="see the findings in the report; nothing was changed",
    )


def _cancelled(report: MigrationReport) -> VmckptError:
    return Cancelled(f"cancelled; {report.guest} is running on {report.source}")


def _timed_out(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"time limit reached; {report.guest} is running on {report.source}",
        hint="allow more time, a longer --max-downtime or more --bandwidth",
    )


def _not_converged(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"the migration was aborted under policy {report.policy}; {report.guest} is running on"
        f" {report.source}",
        hint="see the decisions in the report, or use --policy must-finish",
    )


def _failed(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"{report.error or 'libvirt gave no reason'}; {report.guest} is running on {report.source}"
    )


def _shut_off(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"{report.guest} stopped during the migration and is running on neither {report.source} nor"
        f" {report.target}",
        hint=f"check the guest's console and log, then run virsh start {report.guest} (if libvirtd"
        " reports that a job holds the domain, restart libvirtd first)",
    )


def _postcopy_paused(report: MigrationReport) -> VmckptError:
    return PostcopyPaused(
        f"the post-copy stream broke: {report.guest} is waiting on {report.target} for memory that"
        f" is still on {report.source}; nothing is lost unless QEMU is stopped on either host",
        hint=f"fix the network, then run vmckpt resume {report.job}"
        if report.job is not None
        else f"fix the network, then run virsh migrate {report.guest} URI --postcopy-resume with"
        " the original options",
    )


def _lost(report: MigrationReport) -> VmckptError:
    return OutcomeUnknown(
        f"part of {report.guest}'s memory is lost: one side of the post-copy migration died, and"
        f" the other side is paused on {report.source} or {report.target}",
        host=report.target,
        hint=f"run virsh destroy {report.guest} on that host, then start the guest from its disks",
    )


def _unknown(report: MigrationReport) -> VmckptError:
    why = f" ({'; '.join(report.warnings)})" if report.warnings else ""
    return OutcomeUnknown(
        f"it is unknown where {report.guest} is running{why}",
        host=report.source,
        hint=f"run virsh list --all on {report.source} and {report.target} before you start the"
        " guest",
    )


_ERRORS: Mapping[Outcome, Callable[[MigrationReport], VmckptError | None]] = {
    Outcome.COMPLETED: _well,
    Outcome.PLANNED: _well,
    Outcome.BLOCKED: _blocked,
    Outcome.CANCELLED: _cancelled,
    Outcome.TIMED_OUT: _timed_out,
    Outcome.NOT_CONVERGED: _not_converged,
    Outcome.FAILED: _failed,
    Outcome.SHUT_OFF: _shut_off,
    Outcome.POST_COPY_PAUSED: _postcopy_paused,
    Outcome.LOST: _lost,
    Outcome.UNKNOWN: _unknown,
}
