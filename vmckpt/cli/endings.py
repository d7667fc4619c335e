"""How a migration ended, as the error that the command ends with."""

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


def error(report: MigrationReport) -> VmckptError | None:
    """None if it ended well."""
    return _ERRORS[report.outcome](report)


def _well(_report: MigrationReport) -> None:
    return None


def _blocked(report: MigrationReport) -> VmckptError:
    count = sum(f.severity is Severity.BLOCKER for f in report.findings)
    noun = "reason" if count == 1 else "reasons"
    return Blocked(
        f"{report.guest} cannot move from {report.source} to {report.target}: {count} {noun}",
        mend="see above; nothing was changed",
    )


def _cancelled(report: MigrationReport) -> VmckptError:
    return Cancelled(f"cancelled; {report.guest} runs on {report.source}")


def _timed_out(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"time limit reached; {report.guest} runs on {report.source}",
        mend="allow more time, a longer --max-downtime or more --bandwidth",
    )


def _not_converged(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"given up, as policy {report.policy} wants it; {report.guest} runs on {report.source}",
        mend="see the decisions above, or use --policy must-finish",
    )


def _failed(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"{report.error or 'libvirt gave no reason'}; {report.guest} runs on {report.source}"
    )


def _shut_off(report: MigrationReport) -> VmckptError:
    return MigrationFailed(
        f"{report.guest} ended meanwhile and runs on neither {report.source} nor {report.target}",
        mend="look at its console and log, then start it with virsh start (should libvirtd say"
        " that a job still holds it, restart that libvirtd first)",
    )


def _postcopy_paused(report: MigrationReport) -> VmckptError:
    return PostcopyPaused(
        f"the stream is broken and {report.guest} waits on {report.target} for memory that is on"
        f" {report.source}; nothing is lost as long as both are left alone",
        mend=f"mend the network, then run vmckpt resume {report.job}"
        if report.job is not None
        else "mend the network, then run virsh migrate --postcopy-resume with all its options",
    )


def _lost(report: MigrationReport) -> VmckptError:
    return OutcomeUnknown(
        f"one end of {report.guest}'s post-copy died, and part of its memory with it; the other end"
        f" stands still on {report.source} or {report.target}",
        host=report.target,
        mend=f"run virsh destroy {report.guest} there, then start it from its disks",
    )


def _unknown(report: MigrationReport) -> VmckptError:
    return OutcomeUnknown(
        f"it is not known where {report.guest} runs ({'; '.join(report.warnings)})",
        host=report.source,
        mend=f"look with virsh at {report.source} and {report.target} before anything is started",
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
