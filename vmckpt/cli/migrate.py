"""vmckpt migrate and resume."""

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import GUEST, INVENTORY, JOB, JSON, POLICIES, POLICY, PROBE, rate, seconds
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.progress import Progress
from vmckpt.errors import BadInput, at_host
from vmckpt.journal import wording
from vmckpt.migration import report as reports
from vmckpt.migration.outcome_error import migration_error
from vmckpt.migration.report import MigrationReport
from vmckpt.model.finding import Severity
from vmckpt.model.migration import Driver, Mode, Outcome
from vmckpt.policy.model import CopyKind, Tls
from vmckpt.units import (
    MIB,
    BytesPerSecond,
    Seconds,
    show_bytes,
    show_rate,
    show_seconds,
)

if TYPE_CHECKING:
    from vmckpt.migration.request import MigrateRequest


def migrate(
    guest: GUEST,
    to: Annotated[
        str,
        typer.Option("--to", metavar="HOST", help="Target host.", autocompletion=arguments.hosts),
    ],
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST",
            help="Source host. Default: the host that runs the guest.",
            autocompletion=arguments.hosts,
        ),
    ] = None,
    policy: POLICY = None,
    policies: POLICIES = None,
    mode: Annotated[Mode | None, typer.Option(help="Override the policy's mode.")] = None,
    bandwidth: Annotated[
        BytesPerSecond | None,
        typer.Option(parser=rate, metavar="RATE", help="Bandwidth limit, like 200MiB/s or 1gbit."),
    ] = None,
    max_downtime: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="Maximum downtime to aim for."),
    ] = None,
    timeout: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="Give up after this time, like 5m."),
    ] = None,
    tls: Annotated[Tls | None, typer.Option(help="Override the policy's TLS setting.")] = None,
    copy_storage: Annotated[
        CopyKind | None, typer.Option(help="Copy disks that the hosts do not share.")
    ] = None,
    probe: PROBE = None,
    observe: Annotated[
        bool, typer.Option("--observe", help="Report decisions, but do not act on them.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record samples and decisions in this file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; change nothing.")] = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Move a running guest to another host.

    The guest's policy decides how to migrate (vmckpt policy explain GUEST); options given here
    override the policy. Before the command changes anything, it checks for blockers and shows all
    blockers that it finds. Ctrl-C cancels the migration; the guest keeps running on the source. To
    control the migration from another terminal, use vmckpt watch, set, postcopy, pause and cancel.

    Examples:

        vmckpt migrate web1 --to beta

        vmckpt migrate web1 --to beta --policy must-finish

        vmckpt migrate web1 --to beta --max-downtime 100ms --timeout 5m

        vmckpt migrate web1 --to beta --mode checkpoint

        vmckpt migrate web1 --to beta --dry-run --json
    """
    from vmckpt.migration.request import MigrateRequest, PolicyOverrides
    from vmckpt.policy.values import LONGEST_DOWNTIME

    if bandwidth is not None and bandwidth < MIB:
        raise typer.BadParameter("libvirt sets limits in whole MiB/s; the minimum is 1MiB/s")
    if max_downtime is not None and max_downtime > LONGEST_DOWNTIME:
        raise typer.BadParameter(f"QEMU accepts a downtime of at most {LONGEST_DOWNTIME:g}s")
    request = MigrateRequest(
        guest=guest,
        to=to,
        from_=from_,
        policy=policy,
        overrides=PolicyOverrides(
            mode=mode,
            bandwidth=bandwidth,
            max_downtime=max_downtime,
            timeout=timeout,
            tls=tls,
            copy=copy_storage,
        ),
        dry_run=dry_run,
        observe=observe,
        trace=trace,
        probe=probe,
    )
    report = asyncio.run(_run(request, inventory, policies))
    if json:
        output.print_json(reports.as_json(report))
    else:
        _show(report)
    if (error := migration_error(report)) is not None:
        raise error


async def _run(
    request: "MigrateRequest", inventory: Path | None, folder: Path | None
) -> MigrationReport:
    from vmckpt.app import controller, migration
    from vmckpt.app import policies as app_policies

    stop = stop_on_signals("stopping: confirming that the guest is running on the source")
    known = controller.load_inventory(inventory)
    shelf, forced = app_policies.load_policies(known, folder, request.policy)
    request = dataclasses.replace(request, policy=forced)
    with Progress(f"{request.guest} → {request.to}") as progress:
        caller = controller.Caller(emit=progress.take, warn=output.say, stop=stop)
        acting = controller.Controller(inventory=known, policies=shelf, caller=caller)
        return await migration.migrate(acting, request)


def resume(
    job: JOB,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Resume a broken post-copy migration or a paused evacuation.

    If the stream of a post-copy migration breaks, the guest waits on the target for memory that is
    still on the source; nothing is lost. The command retries the connection for as long as the
    policy allows. Ctrl-C stops the retries and changes nothing.

    Examples:

        vmckpt resume m-7k3f

        vmckpt resume e-4b7x
    """
    from vmckpt.app import controller, migration

    if migration.of_whole_host(job):
        answer = migration.go_on(lambda: controller.load_inventory(inventory), job)
        if not answer.ok:
            raise BadInput(answer.text, hint=f"see vmckpt job {job}")
        if json:
            output.print_json({"ok": answer.ok, "text": answer.text})
        else:
            output.say(answer.text)
        return
    report = asyncio.run(_resume(job, inventory, policies))
    if json:
        output.print_json(reports.as_json(report))
    else:
        _show(report)
    if (error := migration_error(report)) is not None:
        raise error


async def _resume(job: str, inventory: Path | None, folder: Path | None) -> MigrationReport:
    from vmckpt.app import controller, migration
    from vmckpt.app import policies as app_policies

    known = controller.load_inventory(inventory)
    policies = app_policies.survey_policies(known, folder).policies
    stop = stop_on_signals("stopping: both parts of the guest stay as they are")
    with Progress(f"resume {job}") as progress:
        caller = controller.Caller(emit=progress.take, warn=output.say, stop=stop)
        acting = controller.Controller(inventory=known, policies=policies, caller=caller)
        return await migration.resume(acting, job)


def _show(report: MigrationReport) -> None:
    """Print the report to stdout."""
    if report.outcome in (Outcome.BLOCKED, Outcome.PLANNED):
        shown = [f for f in report.findings if f.severity is not Severity.WARNING]
        output.findings(output.out, shown)
        if report.outcome is Outcome.PLANNED:
            output.out.print(
                f"{report.guest} can move from {report.source} to {report.target};"
                " nothing was changed"
            )
        return
    how = f"{report.mode}, policy {report.policy}, {report.driver}"
    output.out.print(
        output.styled("bold", f"{report.guest}:"),
        f"{report.outcome}, {report.source} → {report.target} ({how})",
    )
    _figures(report)
    _passes(report)
    for one in report.decisions:
        at, numbers = show_seconds(one.at - report.began), wording.numbers(one.numbers)
        output.out.print(f"at {at}: {one.action}, because {one.reason} {numbers}".rstrip())
    for image in report.left_behind:
        if not report.stays:  # a warning below explains which images must not be removed manually
            output.out.print(
                f"left on {report.source}: {image}; remove it when you no longer need it"
            )
    for image in report.removed:
        output.out.print(f"removed from {report.source}: {image}")
    told = {at_host(found.where, found.text) for found in report.findings}
    for warning in dict.fromkeys(report.warnings):
        if warning not in told:  # preflight's warnings were printed before the migration
            output.out.print(f"warning: {warning}")


def _figures(report: MigrationReport) -> None:
    totals, figures = report.totals, output.table("", ">")
    figures.show_header = False
    figures.add_row("total", show_seconds(report.total))
    if totals is not None and totals.setup is not None:
        figures.add_row("setup", show_seconds(totals.setup))
    if report.downtime is not None:
        origin = "the agents" if report.driver is Driver.AGENTS else "QEMU"
        if totals is None or totals.downtime is None:
            origin = "libvirt's events"
        figures.add_row(f"downtime, from {origin}", show_seconds(report.downtime))
    if report.observed_downtime is not None:
        figures.add_row("downtime, observed", show_seconds(report.observed_downtime))
    _forecast(report, figures)
    figures.add_row("iterations", str(report.iterations))
    figures.add_row("transferred", show_bytes(report.transferred))
    output.out.print(figures)


_MARKS = (
    ("total", "total, forecast", show_seconds),
    ("downtime", "downtime, forecast", show_seconds),
    ("sent", "transferred, forecast", show_bytes),
)


def _forecast(report: MigrationReport, figures: Table) -> None:
    """Add the forecast's ranges to the table of measured figures."""
    score = (report.forecast or {}).get("score") or {}
    for key, label, show in _MARKS:
        if (mark := score.get(key)) is not None:
            low, high = mark["expected"]
            done = report.outcome is Outcome.COMPLETED
            hit = " (missed)" if done and not mark["covered"] else ""
            span = f"{show(low)} or more" if high is None else f"{show(low)} to {show(high)}"
            figures.add_row(label, f"{span}{hit}")


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
