"""vmckpt evacuate, repopulate and balance."""

import asyncio
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live

from vmckpt.cli import output, progress
from vmckpt.cli.arguments import HOST, INVENTORY, JSON, POLICIES
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.progress import Row
from vmckpt.errors import BadInput, Blocked, GuestsRemaining, silent_hosts, some
from vmckpt.model.events import Decided, Event, OnItsWay, Sampled
from vmckpt.policy.model import Policy
from vmckpt.units import Bytes, Seconds, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.app.evacuation import Imagined
    from vmckpt.evacuation.plan.placement import Assignment, Unplaced
    from vmckpt.evacuation.plan.plan import Checked, Plan
    from vmckpt.evacuation.report import Report
    from vmckpt.evacuation.task import Task


_NAMED = 8
"""Maximum number of guests that are named for each target and reason."""


class Story:
    """The progress of an evacuation: log lines on stderr, and a panel of moves on a terminal."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._rows: dict[str, Row] = {}
        self._logged = -math.inf
        self._live: Live | None = None

    def take(self, event: Event) -> None:
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        match event:
            case Decided():
                at = show_seconds(now - self._began)
                output.say(f"{at:>8} {event.decision.action}: {event.decision.reason}")
                self._logged = now  # delays the next progress line
            case OnItsWay(sampled=None):
                self._rows.pop(event.guest, None)
            case OnItsWay(sampled=Sampled() as sampled):
                self._rows[event.guest] = Row(event.guest, event.target, sampled)
                if self._live is None and now - self._logged >= progress.LOG_EVERY:
                    self._logged = now
                    at = show_seconds(now - self._began)
                    output.say(f"{at:>8} {progress.rows_line(list(self._rows.values()))}")
            case _:
                pass  # each move has its own job, which records the other events of the move

    @contextmanager
    def going(self, title: str) -> Iterator[None]:
        """Show the panel of moves on a terminal while the context is open."""
        if not output.err.is_terminal:
            yield
            return
        self._live = Live(
            get_renderable=lambda: self._panel(title), console=output.err, refresh_per_second=4,
            transient=True,
        )  # fmt: skip
        with self._live:
            yield

    def _panel(self, title: str) -> Group:
        elapsed = Seconds(0.0 if self._began is None else time.monotonic() - self._began)
        rows = list(self._rows.values())
        return progress.rows_panel(title, f"{len(rows)} moving", elapsed, rows)

    @contextmanager
    def looking(self, what: str) -> Iterator[None]:
        """Show the text `what` as the current activity while the context is open."""
        if not output.err.is_terminal:
            output.say(f"{what} ...")
            yield
        else:
            with output.err.status(output.in_one_line(what)):
                yield


def show_plan(plan: "Plan", console: Console) -> None:
    """Print a plan: moves and their reasons, the load on each host, and guests that stay."""
    from vmckpt.evacuation.task import Kind

    host = plan.task.host
    if plan.going:
        _moves(plan, console)
    for tenant in plan.shut_down:
        console.print(
            f"{tenant.name}: will be shut down; to start it again, run vmckpt repopulate {host}"
        )
    for tenant in plan.suspended:
        console.print(
            f"{tenant.name}: will be suspended to disk; to resume it, run vmckpt repopulate {host}"
        )
    for tenant in plan.starts:
        console.print(
            f"{tenant.name}: will be started on {host} again ({show_bytes(tenant.memory)})"
        )
    if plan.course.loads:
        _hosts(plan, console)
    if plan.silent:
        console.print(
            f"not used as targets: no answer from {silent_hosts(dict(sorted(plan.silent.items())))}"
        )
    for one in (*plan.left, *plan.not_started):
        console.print(output.styled("bold", f"stays: {one.tenant.name}:"), one.why)
        console.print(f"        → {one.hint}")
    stops = plan.shut_down or plan.suspended
    if not (plan.going or plan.left or stops or plan.starts or plan.not_started):
        text = {
            Kind.EVACUATE: f"{host} is empty", Kind.BALANCE: "no move would pay off",
        }.get(plan.task.kind, f"all evacuated guests that are running are on {host}")  # fmt: skip
        console.print(f"{text}; nothing to do")
        return
    total = plan.shown_total().show(show_seconds)
    console.print(f"{show_count(len(plan.going), 'move')}, {total} in total")


def _moves(plan: "Plan", console: Console) -> None:
    begins = {one.move.name: one.begins for one in plan.course.steps}
    table = output.table("guest", "to", ">size", "mode", ">begins", ">takes", ">downtime")
    going = sorted(plan.going, key=lambda one: begins.get(one.tenant.name, 0.0))
    for one in going:
        found, begin = plan.check(one), begins.get(one.tenant.name)
        found = None if found is None else found.shown()
        takes = "–" if found is None or found.total is None else found.total.show(show_seconds)
        pause = (
            "–" if found is None or found.downtime is None else found.downtime.show(show_seconds)
        )
        table.add_row(
            one.tenant.name, one.target, _size(one, found),
            "–" if found is None else found.mode,
            "–" if begin is None else f"+{show_seconds(begin)}", takes, pause,
        )  # fmt: skip
    console.print(table)
    reasons: dict[str, list[str]] = {}
    for one in going:
        reasons.setdefault(f"→ {one.target}: {one.why}", []).append(one.tenant.name)
    for why, names in reasons.items():
        console.print(f"{some(names, _NAMED)} {why}")
    for one in going:
        found = plan.check(one)
        for warning in found.warnings if found is not None else ():
            console.print(f"warning: {one.tenant.name} → {one.target}: {warning.text}")


def _size(going: "Assignment", found: "Checked | None") -> str:
    """Format the size of a guest's memory, or the number of bytes to copy if the guest is off."""
    from vmckpt.evacuation.plan.inventory import TravelMethod

    if found is None or found.mode != TravelMethod.OFFLINE:
        return show_bytes(going.tenant.travels)
    return "–" if found.sent is None else show_bytes(Bytes(round(found.sent.high)))


def _hosts(plan: "Plan", console: Console) -> None:
    table = output.table("host", ">memory", ">before", ">peak", ">after", ">CPUs before", ">after")
    for one in plan.course.loads:
        table.add_row(
            one.host, show_bytes(one.memory), show_bytes(one.before), show_bytes(one.most),
            show_bytes(one.after), f"{one.cpus_before:g}", f"{one.cpus_after:g}",
        )  # fmt: skip
    console.print(table)


def show_plays(found: "Imagined") -> None:
    """Print the outcome of simulating a plan for a fleet from a file."""
    from vmckpt.app import evacuation

    if found.plan.going:
        output.out.print(
            f"simulated {found.plays} times, with durations varied by up to"
            f" {evacuation.LUCK.off:.0%} and {evacuation.LUCK.fails:.0%} of the moves failing:"
            f" the run took {found.total.show(show_seconds)}, and"
            f" at least {found.arrived} of {show_count(len(found.plan.going), 'guest')} arrived"
        )


def show_report(report: "Report") -> None:
    """Print the outcome for each guest."""
    from vmckpt.evacuation.task import Kind

    if report.arrived:
        table = output.table("guest", "from", "to", ">took", ">downtime", "job")
        for one in report.arrived:
            pause = "–" if one.downtime is None else show_seconds(one.downtime)
            table.add_row(
                one.guest, one.source, one.target, show_seconds(one.took), pause, one.job or "–"
            )
        output.out.print(table)
    for uuid in report.shut_down:
        how, then = "shut down", "start it again"
        if uuid in report.suspended:
            how, then = "suspended", "resume it"
        name = report.names.get(uuid, uuid)
        output.out.print(f"{how}: {name}; to {then}, run vmckpt repopulate {report.task.host}")
    for name in report.started:
        output.out.print(f"started: {name}")
    for lost in report.bare:
        output.out.print(output.styled("bold", f"{lost.guest} has lost its standby"))
        output.out.print(f"        → {lost.hint}")
    for left in report.ended.left:
        output.out.print(output.styled("bold", f"left behind: {left.tenant.name}:"), left.why)
        output.out.print(f"        → {left.hint}")
    took = show_seconds(report.ended.took)
    if report.task.kind is Kind.EVACUATE and not report.ended.left:
        host = report.task.host
        then = f"to move its guests back, run vmckpt repopulate {host}"
        if not report.comes_back:
            then = f"to end the maintenance, run vmckpt maintenance leave {host}"
        output.out.print(f"{host} is empty after {took} and is in maintenance; {then}")
    else:
        open_again = report.task.kind is Kind.REPOPULATE
        more = f"; {report.task.host} accepts guests again" if open_again else ""
        output.out.print(f"{show_count(len(report.ended.arrived), 'guest')} moved in {took}{more}")


app = typer.Typer(name="evacuate", rich_markup_mode=None, add_completion=False)
repopulate_app = typer.Typer(name="repopulate", rich_markup_mode=None, add_completion=False)
balance_app = typer.Typer(name="balance", rich_markup_mode=None, add_completion=False)
_POLICY = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Policy for all guests. Default: each guest's own policy; if it has none, the policy"
        " maintenance.",
    ),
]
_DRY = Annotated[bool, typer.Option("--dry-run", help="Show the plan; change nothing.")]
_YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
_PARTLY = Annotated[
    bool, typer.Option("--partly", help="Start even if some guests cannot be moved.")
]


@app.command()
def evacuate(
    host: HOST,
    to: Annotated[
        str | None, typer.Option(metavar="A,B", help="Target hosts. Default: all other hosts.")
    ] = None,
    policy: _POLICY = None,
    partly: _PARTLY = False,
    why: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason, shown by vmckpt maintenance list.")
    ] = "",
    dry_run: _DRY = False,
    yes: _YES = False,
    fleet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Plan for the fleet described in a file; contact no host."
        ),
    ] = None,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Move all guests off a host.

    Use this command before you switch a host off. It first shows the plan: the target of each
    guest, the expected duration, the load on the hosts, and all blockers. It then puts the host
    into maintenance and migrates each guest. No guest is placed on the host until you run vmckpt
    maintenance leave HOST. A failed migration is retried, on another host if the target failed.
    Guests are shut down or suspended only if their policy requires it.

    After Ctrl-C, no more moves are started, and running moves are completed. A second Ctrl-C
    cancels running moves. If the command is killed, vmckpt recover continues the evacuation.

    Exit codes: 0 if all guests have left the host; 26 if some guests have not left, or if a guest
    on another host has lost its standby; 21 if a guest cannot be moved and nothing was changed.

    Examples:

        vmckpt evacuate alpha --dry-run

        vmckpt evacuate alpha --yes --why "new memory"

        vmckpt evacuate alpha --to beta,gamma --policy must-finish --yes --json

        vmckpt evacuate h01 --fleet fleet.yaml --dry-run
    """
    from vmckpt.evacuation.task import Kind, Task

    hosts = None if to is None else frozenset(one.strip() for one in to.split(",") if one.strip())
    if hosts is not None and not hosts:
        raise typer.BadParameter("--to contains no host")
    order = Task(kind=Kind.EVACUATE, host=host, to=hosts, policy=policy)
    if fleet is not None:
        if not dry_run:
            raise BadInput("--fleet requires --dry-run", hint="add --dry-run")
        _imagine(order, fleet, policies, json=json)
        return
    _ask(order, _EvacuateOptions(dry_run, yes, partly, why, json), inventory, policies)


@repopulate_app.command()
def repopulate(
    host: HOST,
    policy: _POLICY = None,
    partly: _PARTLY = False,
    dry_run: _DRY = False,
    yes: _YES = False,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Move evacuated guests back to a host and end its maintenance.

    Guests that the evacuation shut down or suspended are started again. If the host no longer has
    room for all guests, the guests that do not fit stay where they are.

    Examples:

        vmckpt repopulate alpha --dry-run

        vmckpt repopulate alpha --yes
    """
    from vmckpt.app import evacuation

    order = evacuation.back_to(host, policy)
    _ask(order, _EvacuateOptions(dry_run, yes, partly, "", json), inventory, policies)


@balance_app.command()
def balance(
    policy: _POLICY = None,
    dry_run: _DRY = False,
    yes: _YES = False,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Balance the load across hosts with migrations that pay off.

    A move is proposed only if it improves the balance by enough to prevent guests from moving back
    and forth, and if it saves more over the next hour than the migration costs. Often no move
    qualifies. The evacuate section of the policies applies: guests that stay, labels, keep_free,
    the number of concurrent moves.

    Examples:

        vmckpt balance --dry-run

        vmckpt balance --yes --json
    """
    from vmckpt.evacuation.task import Kind, Task

    order = Task(kind=Kind.BALANCE, policy=policy)
    _ask(order, _EvacuateOptions(dry_run, yes, True, "", json), inventory, policies)


def _imagine(order: "Task", fleet: Path, policies: Path | None, *, json: bool) -> None:
    from vmckpt.app import evacuation

    found = evacuation.emptied(fleet, order, policies)
    if json:
        output.print_json(found.as_json())
    else:
        show_plan(found.plan, output.out)
        show_plays(found)
    _refuse(found.plan, order, partly=False)


@dataclass(frozen=True, slots=True)
class _EvacuateOptions:
    """Options of evacuate, repopulate and balance."""

    dry_run: bool
    yes: bool
    partly: bool
    why: str
    json: bool


def _ask(
    order: "Task", options: _EvacuateOptions, inventory: Path | None, folder: Path | None
) -> None:
    from vmckpt.evacuation.task import Kind

    if not (options.dry_run or options.yes or sys.stdin.isatty()):
        raise BadInput(
            "stdin is not a terminal, so the plan cannot be confirmed",
            hint="add --yes or --dry-run",
        )
    report = asyncio.run(_run(order, options, inventory, folder))
    if report is None:
        return
    if options.json:
        output.print_json(report.as_json())
    else:
        show_report(report)
    left = report.ended.left
    if left:
        names = ", ".join(one.tenant.name for one in left[:4])
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        where = {Kind.EVACUATE: f"still on {order.host}", Kind.REPOPULATE: "not moved back"}.get(
            order.kind, "not moved"
        )
        raise GuestsRemaining(f"{names}{more}: {where}", hint=left[0].hint)
    if report.bare:
        first = report.bare[0]
        raise GuestsRemaining(
            f"{first.guest}, which is on another host, has lost its standby", hint=first.hint
        )


async def _run(
    order: "Task", options: _EvacuateOptions, inventory: Path | None, folder: Path | None
) -> "Report | None":
    from vmckpt.app import controller, evacuation
    from vmckpt.app.evacuation import Emptying

    abort = asyncio.Event()
    stop = stop_on_signals(
        "stopping: waiting for running moves (press Ctrl-C again to cancel them)",
        "cancelling running moves", abort,
    )  # fmt: skip
    known = controller.load_inventory(inventory)
    shelf, forced = with_policy(known, folder, order.policy)
    order = replace(order, policy=forced)
    story = Story()
    caller = controller.Caller(emit=story.take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=known, policies=shelf, caller=caller)
    if not options.dry_run:
        await evacuation.put_in_order(acting)
    async with Emptying(acting, order) as emptying:
        with story.looking(f"examining {show_count(len(known.hosts), 'host')} and their guests"):
            plan = await emptying.plan()
        if options.dry_run and options.json:
            output.print_json(plan.as_json())
        elif not options.json or sys.stdin.isatty():
            show_plan(plan, output.out if not options.json else output.err)
        if options.dry_run:
            _refuse(plan, order, partly=False)
            return None
        _refuse(plan, order, partly=options.partly)
        # No move is running yet, so Ctrl-C at the prompt exits the command.
        if not options.yes and not _agreed(order):
            output.say("nothing was changed")
            raise typer.Exit(130)
        with story.going(f"{order.kind} {order.host}"):
            return await emptying.carry_out(plan, options.why, abort)


def with_policy(
    known: "controller.Inventory", folder: Path | None, policy: str | None
) -> tuple[tuple[Policy, ...], str | None]:
    """Load all policies, including `policy` if it is a file.

    Returns the policies, and the name of the requested policy; None if none was requested. Raises
    PolicyError.
    """
    from vmckpt.app import policies as app_policies

    shelf, forced = app_policies.load_policies(known, folder, policy)
    if forced is not None and policy != forced:  # `policy` is a file: load the others as well
        rest = app_policies.load_policies(known, folder)[0]
        shelf = (*shelf, *(one for one in rest if one.name != forced))
    return tuple(shelf), forced


def _refuse(plan: "Plan", order: "Task", *, partly: bool) -> None:
    """Raise Blocked if a guest cannot be moved, unless `partly`."""
    from vmckpt.evacuation.task import Kind

    if not plan.left or partly:
        return
    many = f"{len(plan.left)} guests" if len(plan.left) > 1 else "one guest"
    hints = dict.fromkeys(one.hint for one in plan.left)
    hint = next(iter(hints)) if len(hints) == 1 else "see the hint of each guest in the plan"
    others = "the others" if order.kind is Kind.EVACUATE else "the others back"
    raise Blocked(
        f"{many} cannot be moved: {left_by_reason(plan.left)}; nothing was changed",
        hint=f"{hint}; or use --partly to move {others}",
    )


_MOST_NAMES = 10
"""Maximum number of guests that an error names for each reason."""


def left_by_reason(left: "Sequence[Unplaced]") -> str:
    """Return the guests that stay, by reason: "web1, web2: no memory; db1: it has a GPU".

    At most `_MOST_NAMES` guests are named for each reason.
    """
    names: dict[str, list[str]] = {}
    for one in left:
        names.setdefault(one.why, []).append(one.tenant.name)
    return "; ".join(f"{some(guests, _MOST_NAMES)}: {why}" for why, guests in names.items())


def _agreed(order: "Task") -> bool:
    from vmckpt.evacuation.task import Kind

    what = {
        Kind.EVACUATE: f"evacuate {order.host}", Kind.REPOPULATE: f"repopulate {order.host}",
    }.get(order.kind, "balance the load")  # fmt: skip
    stops = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm(f"{what} as planned?", err=True)
    except typer.Abort:
        return False
    finally:
        signal.signal(signal.SIGINT, stops)
