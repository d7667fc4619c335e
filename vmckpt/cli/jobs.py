"""vmckpt jobs, job, set, postcopy, cancel and pause, for jobs of any controller."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JOB, JSON, rate, seconds
from vmckpt.errors import BadInput, InventoryError
from vmckpt.journal import wording
from vmckpt.journal.records import RequestKind
from vmckpt.model import guest as model_guest
from vmckpt.units import MIB, BytesPerSecond, Seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from vmckpt.journal.jobs import JobDetail, JobView


def jobs(
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="Include jobs that have ended.")
    ] = False,
    guest: Annotated[
        str | None,
        typer.Option(metavar="GUEST", help="Only jobs of the guest with this name or UUID."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Maximum number of ended jobs.")
    ] = 50,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """List running jobs, or all jobs, newest first.

    A job in state "unattended" has lost its controller; run vmckpt recover. For a protection, the
    state shows how far the standby is behind, if the agents answer immediately. If the agents
    report two copies of a guest, the command names the guest in an error and exits with code 27.

    Examples:

        vmckpt jobs --all

        vmckpt jobs --all --guest web1
    """
    from vmckpt.journal import jobs as journal_jobs

    with journal_jobs.open_journal() as journal:
        views = journal_jobs.jobs(journal, everything=everything, limit=limit, guest=guest)
    entries = protections(views, inventory)
    if json:
        output.print_json([_as_json(view, entries) for view in views])
    elif views:
        output.out.print(table(views, time.time(), entries))
    else:
        output.say(
            "no jobs found" if everything else "no running jobs found; see vmckpt jobs --all"
        )
    if entries:
        from vmckpt.protection.copies import of_protections

        if twice := of_protections(entries.values()):
            raise model_guest.error(twice)


def protections(
    views: "Sequence[JobView]", inventory: Path | None
) -> Mapping[str, Mapping[str, Any]]:
    """Ask the agents of protections for their status.

    Returns, by job ID, the status of each job that is delegated to agents; empty if there is no
    such job, or if `inventory` is None and no inventory is found. Raises InventoryError if
    `inventory` cannot be loaded.
    """
    from vmckpt.app import controller as app_controller

    found = [
        view.operation
        for view in views
        if view.operation.active and view.operation.controller.entrusted
    ]
    if not found:
        return {}
    # These modules are loaded only if there is a protection.
    from vmckpt.app import protection

    try:
        known = app_controller.load_inventory(inventory)
    except InventoryError as exc:
        if inventory is not None:
            raise
        output.say(f"warning: showing protections from the journal only: {exc}")
        return {}
    return asyncio.run(protection.protection_summaries(known, found))


def _as_json(view: "JobView", entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    if (entry := entries.get(view.operation.id)) is None:
        return view.as_json()
    from vmckpt.protection import status
    from vmckpt.protection.copies import of_protections

    told: dict[str, Any] = {"protection": status.parse_status(entry).as_json()}
    for one in of_protections([entry]):
        told["two_copies"] = one.as_json()
    return view.as_json() | told


def _state(view: "JobView", entries: Mapping[str, Mapping[str, Any]]) -> str | Text:
    if view.unattended:
        return output.styled("bold red", "unattended")
    if (entry := entries.get(view.operation.id)) is None:
        return view.doing
    from vmckpt.cli import watch_protection
    from vmckpt.protection.copies import of_protections

    if of_protections([entry]):
        return output.styled("bold red", "two copies")
    return watch_protection.word(entry)


def table(
    views: "Sequence[JobView]",
    now: float,
    entries: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Table:
    """Return the table of jobs, which fits into 80 columns. `entries`: from `protections`."""
    shown = output.table("job", "guest", "from → to", "state", ">done", "began", "by")
    for view in views:
        operation = view.operation
        shown.add_row(
            operation.id,
            operation.guest,
            operation.way,
            _state(view, entries),
            "–" if view.sample is None else f"{view.sample.done:.0%}",
            wording.clock(operation.began_at, now),
            operation.asked_by,
        )
    return shown


def job(job: JOB, json: JSON = False) -> None:
    """Show a job in detail: report, decisions, forecast, requests.

    Example:

        vmckpt job m-7k3f --json
    """
    from vmckpt.journal import jobs as journal_jobs

    with journal_jobs.open_journal() as journal:
        found = journal_jobs.job(journal, job)
    if json:
        output.print_json(found.as_json())
    else:
        show(output.out, found, time.time())


def show(console: Console, found: "JobDetail", now: float) -> None:
    """Print a job in detail. `now`: in seconds since 1970."""
    view, operation = found.view, found.view.operation
    console.print(f"{operation.id} {operation.guest}: {view.doing}, {operation.way}")
    facts = output.table("", "")
    facts.show_header = False
    for name, text in _facts(found, now):
        facts.add_row(name, text)
    console.print(facts)
    for event in found.events:
        if (line := wording.event(event.kind, event.values)) is not None:
            console.print(f"at {show_seconds(event.at)}: {line}")
    for request in found.requests:
        answer = "not answered" if request.ok is None else request.answer
        arguments = wording.pairs(request.arguments)
        asked = f"{request.asked_by} requested {request.kind} {arguments}".rstrip()
        console.print(f"{asked}: {answer}")
    for warning in (operation.report or {}).get("warnings") or ():
        console.print(f"warning: {warning}")


def _facts(found: "JobDetail", now: float) -> list[tuple[str, str]]:
    operation, controller = found.view.operation, found.view.operation.controller
    by = operation.asked_by + (f" from {operation.asked_from}" if operation.asked_from else "")
    facts = [("began", wording.clock(operation.began_at, now)), ("asked by", by)]
    if operation.active:
        alive = {True: "alive", False: "dead", None: "cannot be checked from here"}
        process = f"process {controller.pid} on {controller.host}"
        facts.append(("controller", f"{process}, {alive[found.view.attended]}"))
    if operation.ended_at is not None:
        facts.append(("ended", wording.clock(operation.ended_at, now)))
    given = (("policy", operation.policy), ("mode", operation.mode))
    facts += [(name, value) for name, value in given if value is not None]
    if found.view.sample is not None:
        facts.append(("done", f"{found.view.sample.done:.0%}"))
    facts += _figures(operation.report or {})
    if found.forecast is not None:
        facts.append(("forecast", wording.pairs(found.forecast.values)))
    return facts


_TIMES = {
    "total_ms": "total",
    "setup_ms": "setup",
    "downtime_ms": "downtime, from QEMU",
    "observed_downtime_ms": "downtime, observed",
}


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures = [
        (name, show_seconds(report[key] / 1000))
        for key, name in _TIMES.items()
        if report.get(key) is not None
    ]
    if report.get("iterations") is not None:
        figures.append(("iterations", str(report["iterations"])))
    if report.get("bytes_transferred") is not None:
        figures.append(("transferred", show_bytes(report["bytes_transferred"])))
    if report.get("error"):
        figures.append(("error", str(report["error"])))
    return figures


def set_(
    job: JOB,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Bandwidth limit, like 200MiB/s, 1gbit or unlimited."),
    ] = None,
    max_downtime: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="Maximum downtime to aim for."),
    ] = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Change the limits of a running migration.

    Examples:

        vmckpt set m-7k3f --bandwidth 100MiB/s

        vmckpt set web1 --bandwidth unlimited --max-downtime 500ms
    """
    wanted: list[tuple[RequestKind, dict[str, Any]]] = []
    if bandwidth is not None:
        wanted.append((RequestKind.BANDWIDTH, {"bytes_per_second": _limit(bandwidth)}))
    if max_downtime is not None:
        wanted.append((RequestKind.MAX_DOWNTIME, {"seconds": max_downtime}))
    if not wanted:
        raise typer.BadParameter("nothing to set; use --bandwidth, --max-downtime or both")
    _ask(job, wanted, inventory, json=json)


def _limit(text: str) -> BytesPerSecond | None:
    if text == "unlimited":
        return None
    limit = rate(text)
    if limit < MIB:
        raise typer.BadParameter("libvirt sets limits in whole MiB/s; the minimum is 1MiB/s")
    return limit


def postcopy(job: JOB, inventory: INVENTORY = None, json: JSON = False) -> None:
    """Switch a running migration to post-copy.

    The guest resumes on the target immediately and fetches its remaining memory from the source.
    The migration can no longer be cancelled, because the guest's memory is spread over both hosts
    until all of it is fetched.

    Example:

        vmckpt postcopy m-7k3f
    """
    _ask(job, [(RequestKind.POSTCOPY, {})], inventory, json=json)


def cancel(job: JOB, inventory: INVENTORY = None, json: JSON = False) -> None:
    """Cancel a running job.

    When a migration is cancelled, the guest keeps running on the source. When an evacuation is
    cancelled, no more moves are started. Other jobs end as with Ctrl-C in their terminal.

    Examples:

        vmckpt cancel web1

        vmckpt cancel e-4b7x
    """
    _ask(job, [(RequestKind.CANCEL, {})], inventory, json=json)


def pause(job: JOB, inventory: INVENTORY = None, json: JSON = False) -> None:
    """Pause a migrating guest, or a running evacuation.

    A paused guest changes no memory, so its migration can complete; the guest resumes when the
    migration ends. A paused evacuation starts no more moves until you run vmckpt resume.

    Examples:

        vmckpt pause m-7k3f

        vmckpt pause e-4b7x
    """
    _ask(job, [(RequestKind.PAUSE, {})], inventory, json=json)


def _ask(
    job: str,
    wanted: Sequence[tuple[RequestKind, dict[str, Any]]],
    inventory: Path | None,
    *,
    json: bool,
) -> None:
    """Send requests to a job one after the other, and print the answers.

    Raises BadInput if a request is refused.
    """
    from vmckpt.app import controller as app_controller
    from vmckpt.app import migration
    from vmckpt.journal import jobs as journal_jobs

    refused, told = [], []
    with journal_jobs.open_journal() as journal:
        id_ = journal.operation(job).id
    for kind, arguments in wanted:
        answer = migration.control(
            lambda: app_controller.load_inventory(inventory), id_, kind, arguments, output.say
        )
        one = {"request": str(kind), "arguments": arguments}
        told.append({**one, "ok": answer.ok, "answer": answer.text})
        if not answer.ok:
            refused.append(f"{kind}: {answer.text}")
        elif not json:
            output.out.print(f"{id_}: {answer.text}")
    if json:
        output.print_json({"job": id_, "answers": told})
    if refused:
        raise BadInput(f"{id_} refused {'; '.join(refused)}")
