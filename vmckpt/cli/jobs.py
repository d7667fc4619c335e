"""vmckpt jobs, job, set, postcopy, cancel and pause: other terminals' operations."""

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
        bool, typer.Option("--all", "-a", help="Also those that have ended.")
    ] = False,
    guest: Annotated[
        str | None, typer.Option(help="Only those of this guest, by its name or UUID.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many that have ended.")] = 50,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show the jobs that run, or all, the latest first.

    "unattended" is a job whose controller has ended before the job did. The agents of protections
    are asked how far their standby is behind, where their hosts answer at once. A guest that has
    two copies by what they say is named at the end (exit code 27).

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
        output.say("no jobs" if everything else "no job runs; vmckpt jobs --all shows past ones")
    if entries:
        from vmckpt.protection.copies import of_protections

        if twice := of_protections(entries.values()):
            raise model_guest.error(twice)


def protections(
    views: "Sequence[JobView]", inventory: Path | None
) -> Mapping[str, Mapping[str, Any]]:
    """How those of them stand that agents go on with, by job; none without an inventory."""
    from vmckpt.app import controller as app_controller

    found = [
        view.operation
        for view in views
        if view.operation.active and view.operation.controller.entrusted
    ]
    if not found:
        return {}
    # What protections need is loaded by those alone who have one.
    from vmckpt.app import protection

    try:
        known = app_controller.load_inventory(inventory)
    except InventoryError as exc:
        if inventory is not None:
            raise
        output.say(f"protections are shown as the journal has them: {exc}")
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
    """The list of jobs; fits into 80 columns. `entries`: what `protections` tells."""
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
    """Show everything there is on a job: report, decisions, forecast, requests.

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
    """A job for people."""
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
        asked = f"{request.asked_by} asked for {request.kind} {arguments}".rstrip()
        console.print(f"{asked}: {answer}")
    for warning in (operation.report or {}).get("warnings") or ():
        console.print(f"warning: {warning}")


def _facts(found: "JobDetail", now: float) -> list[tuple[str, str]]:
    operation, controller = found.view.operation, found.view.operation.controller
    by = operation.asked_by + (f" from {operation.asked_from}" if operation.asked_from else "")
    facts = [("began", wording.clock(operation.began_at, now)), ("asked by", by)]
    if operation.active:
        alive = {True: "alive", False: "dead", None: "cannot be seen from here"}
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
    "downtime_ms": "downtime, as QEMU says",
    "observed_downtime_ms": "blackout, seen from outside",
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
        typer.Option(metavar="RATE", help="New limit, like 200MiB/s or 1gbit, or unlimited."),
    ] = None,
    max_downtime: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="Longest pause QEMU may aim for."),
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
        raise typer.BadParameter("say what to set: --bandwidth, --max-downtime or both")
    _ask(job, wanted, inventory, json=json)


def _limit(text: str) -> BytesPerSecond | None:
    if text == "unlimited":
        return None
    limit = rate(text)
    if limit < MIB:
        raise typer.BadParameter("libvirt limits in whole MiB/s: 1MiB/s is the least")
    return limit


def postcopy(job: JOB, inventory: INVENTORY = None, json: JSON = False) -> None:
    """Switch a running migration to post-copy: the guest goes on at the target at once.

    From then on the guest's memory is on both hosts: it cannot be cancelled any more.

    Example:

        vmckpt postcopy m-7k3f
    """
    _ask(job, [(RequestKind.POSTCOPY, {})], inventory, json=json)


def cancel(job: JOB, inventory: INVENTORY = None, json: JSON = False) -> None:
    """Cancel a running job: its guest goes on where it was. An evacuation begins nothing new.

    Examples:

        vmckpt cancel web1

        vmckpt cancel e-4b7x
    """
    _ask(job, [(RequestKind.CANCEL, {})], inventory, json=json)


def pause(job: JOB, inventory: INVENTORY = None, json: JSON = False) -> None:
    """Let the guest of a running migration stand still, so that the migration can end.

    An evacuation begins nothing new until vmckpt resume.

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
    """Ask one thing after the other, and say what became of each."""
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
