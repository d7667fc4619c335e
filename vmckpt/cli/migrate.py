"""vmckpt migrate."""

import asyncio
import signal
from pathlib import Path
from typing import Annotated

import typer

from vmckpt import api
from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON, rate, seconds
from vmckpt.cli.progress import Progress
from vmckpt.errors import Blocked, Cancelled, MigrationFailed, OutcomeUnknown, VmckptError
from vmckpt.migrate import report as reports
from vmckpt.migrate.report import MigrationReport
from vmckpt.model.findings import Severity
from vmckpt.model.jobs import Outcome
from vmckpt.units import MIB, BytesPerSecond, Seconds, show_bytes, show_rate, show_seconds


def migrate(
    guest: Annotated[str, typer.Argument(help="Name or UUID of the guest.")],
    to: Annotated[str, typer.Option("--to", help="Host to move it to.")],
    from_: Annotated[
        str | None, typer.Option("--from", help="Host it is on; found by itself if left out.")
    ] = None,
    bandwidth: Annotated[
        BytesPerSecond | None,
        typer.Option(parser=rate, metavar="RATE", help="Limit, like 200MiB/s or 1gbit."),
    ] = None,
    max_downtime: Annotated[
        Seconds,
        typer.Option(parser=seconds, metavar="TIME", help="Longest pause QEMU may aim for."),
    ] = "300ms",  # type: ignore[assignment]
    timeout: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="Give up after that, like 5m."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; change nothing.")] = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Move a running guest to another host.

    All reasons against it are shown at once, before anything is changed. Ctrl-C cancels: the guest
    goes on where it was.

    Examples:

        vmckpt migrate web1 --to beta

        vmckpt migrate web1 --to beta --bandwidth 200MiB/s --max-downtime 100ms --timeout 5m

        vmckpt migrate web1 --to beta --dry-run --json
    """
    if bandwidth is not None and bandwidth < MIB:
        raise typer.BadParameter("libvirt limits in whole MiB/s: 1MiB/s is the least")
    request = api.MigrateRequest(
        guest=guest,
        to=to,
        from_=from_,
        bandwidth=bandwidth,
        max_downtime=max_downtime,
        timeout=timeout,
        dry_run=dry_run,
    )
    report = asyncio.run(_run(request, inventory))
    if json:
        output.print_json(reports.as_json(report))
    else:
        _show(report)
    if (error := _error(report)) is not None:
        raise error


async def _run(request: api.MigrateRequest, inventory: Path | None) -> MigrationReport:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        if not stop.is_set():
            output.say("stopping: waiting until the guest is seen running on the source")
            stop.set()
        else:
            output.say("still stopping; a migration cannot be left half done")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel)
    with Progress(f"{request.guest} → {request.to}") as progress:
        return await api.migrate(api.load_inventory(inventory), request, progress.take, stop)


def _error(report: MigrationReport) -> VmckptError | None:
    """The error that stands for how it ended; None if it ended well."""
    guest, source = report.guest, report.source
    match report.outcome:
        case Outcome.COMPLETED | Outcome.PLANNED:
            return None
        case Outcome.BLOCKED:
            count = sum(f.severity is Severity.BLOCKER for f in report.findings)
            noun = "reason" if count == 1 else "reasons"
            return Blocked(
                f"{guest} cannot move from {source} to {report.target}: {count} {noun}",
                mend="see above; nothing was changed",
            )
        case Outcome.CANCELLED:
            return Cancelled(f"cancelled; {guest} runs on {source}")
        case Outcome.TIMED_OUT:
            return MigrationFailed(
                f"time limit reached; {guest} runs on {source}",
                mend="allow more time, a longer --max-downtime or more --bandwidth",
            )
        case Outcome.FAILED:
            return MigrationFailed(
                f"{report.error or 'libvirt gave no reason'}; {guest} runs on {source}"
            )
        case Outcome.SHUT_OFF:
            return MigrationFailed(
                f"{guest} ended meanwhile and runs on neither {source} nor {report.target}",
                mend="look at its console and log, then start it with virsh start",
            )
        case Outcome.UNKNOWN:
            return OutcomeUnknown(
                f"it is not known where {guest} runs ({'; '.join(report.warnings)})",
                host=source,
                mend=f"look with virsh at {source} and {report.target} before anything is started",
            )


def _show(report: MigrationReport) -> None:
    """The report for people, on stdout."""
    if report.outcome in (Outcome.BLOCKED, Outcome.PLANNED):
        shown = [f for f in report.findings if f.severity is not Severity.WARNING]
        output.findings(output.out, shown)
        if report.outcome is Outcome.PLANNED:
            output.out.print(
                f"{report.guest} can move from {report.source} to {report.target};"
                " nothing was changed"
            )
        return
    output.out.print(
        f"[bold]{report.guest}[/]: {report.outcome}, {report.source} → {report.target}"
        f" (pre-copy, {report.driver})"
    )
    _figures(report)
    _passes(report)
    for one in report.decisions:
        numbers = " ".join(f"{key}={value}" for key, value in one.numbers.items())
        at = show_seconds(one.at - report.began)
        output.out.print(f"at {at}: {one.action}, because {one.reason} {numbers}", markup=False)
    for warning in report.warnings:
        output.out.print(f"warning: {warning}", markup=False)


def _figures(report: MigrationReport) -> None:
    totals, figures = report.totals, output.table("", ">")
    figures.show_header = False
    figures.add_row("total", show_seconds(report.total))
    if totals is not None and totals.setup is not None:
        figures.add_row("setup", show_seconds(totals.setup))
    if totals is not None and totals.downtime is not None:
        figures.add_row("downtime, as QEMU says", show_seconds(totals.downtime))
    if report.observed_downtime is not None:
        figures.add_row("blackout, seen from outside", show_seconds(report.observed_downtime))
    figures.add_row("iterations", str(report.iterations))
    figures.add_row("transferred", show_bytes(report.transferred))
    output.out.print(figures)


def _passes(report: MigrationReport) -> None:
    rows = reports.passes(report.samples, report.began)
    if not rows:
        return
    shown = output.table(
        ">pass", ">began", ">lasted", ">sent", ">left", ">dirty rate", ">bandwidth"
    )
    for row in rows:
        dirty = "–" if row.dirty_rate is None else show_rate(row.dirty_rate)
        shown.add_row(
            str(row.number),
            show_seconds(row.began),
            show_seconds(row.lasted),
            show_bytes(row.sent),
            show_bytes(row.remaining),
            dirty,
            show_rate(row.bandwidth),
        )
    output.out.print(shown)
