"""vmckpt evacuate and repopulate."""

import asyncio
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import HOST, INVENTORY, JSON, POLICIES
from vmckpt.cli.evacuate_show import Story, show_plan, show_plays, show_report
from vmckpt.cli.signals import stop_on_signals
from vmckpt.errors import BadInput, Blocked, SomeLeft
from vmckpt.policy.model import Policy

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.evacuation.plan.plan import Plan
    from vmckpt.evacuation.report import Report
    from vmckpt.evacuation.task import Task

app = typer.Typer(name="evacuate", rich_markup_mode=None, add_completion=False)
repopulate_app = typer.Typer(name="repopulate", rich_markup_mode=None, add_completion=False)
balance_app = typer.Typer(name="balance", rich_markup_mode=None, add_completion=False)
_POLICY = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="For all guests; else each one's own, or maintenance."),
]
_DRY = Annotated[bool, typer.Option("--dry-run", help="Show the plan; change nothing.")]
_YES = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
_PARTLY = Annotated[
    bool, typer.Option("--partly", help="Begin even if not all guests have a place to go to.")
]


@app.command()
def evacuate(
    host: HOST,
    to: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only to these hosts; else to any.")
    ] = None,
    policy: _POLICY = None,
    partly: _PARTLY = False,
    why: Annotated[str, typer.Option(help="For whoever wonders why it is closed.")] = "",
    dry_run: _DRY = False,
    yes: _YES = False,
    fleet: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plan for hosts that a file describes; none is asked."),
    ] = None,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Move all guests away from a host, so that it can be switched off.

    First the plan: each guest's new host, how long it takes, how full hosts become, and everything
    that stands against it. Then it is carried out: the host is in maintenance, nothing new is
    placed on it (vmckpt maintenance leave HOST ends that), and each move is a migration of its own.
    A failed one is tried again, on another host if one failed it; nobody is stopped whose policy
    does not ask for it. Ctrl-C: nothing new begins and what is on its way arrives; twice: that goes
    back, too. A killed one goes on with vmckpt recover.

    Ends with 0 if all have left, 26 if some are left or a guest elsewhere has lost its standby, 21
    if it was not begun.

    Examples:

        vmckpt evacuate alpha --dry-run

        vmckpt evacuate alpha --yes --why "new memory"

        vmckpt evacuate alpha --to beta,gamma --policy must-finish --yes --json

        vmckpt evacuate h01 --fleet fleet.yaml --dry-run
    """
    from vmckpt.evacuation.task import Kind, Task

    hosts = None if to is None else frozenset(one.strip() for one in to.split(",") if one.strip())
    if hosts is not None and not hosts:
        raise typer.BadParameter("--to names no host")
    order = Task(kind=Kind.EVACUATE, host=host, to=hosts, policy=policy)
    if fleet is not None:
        if not dry_run:
            raise BadInput("a fleet of a file can only be planned for", mend="add --dry-run")
        _imagine(order, fleet, policies, json=json)
        return
    _ask(order, _Wishes(dry_run, yes, partly, why, json), inventory, policies)


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
    """Bring back to a host what vmckpt evacuate moved away, and end its maintenance.

    Guests that were shut down for it are started again. Nobody is brought back to a host that has
    become too small for all; who finds no room stays where it is, and runs.

    Examples:

        vmckpt repopulate alpha --dry-run

        vmckpt repopulate alpha --yes
    """
    from vmckpt.app import evacuation

    order = evacuation.back_to(host, policy)
    _ask(order, _Wishes(dry_run, yes, partly, "", json), inventory, policies)


@balance_app.command()
def balance(
    policy: _POLICY = None,
    dry_run: _DRY = False,
    yes: _YES = False,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Even out how full hosts are, by moves that pay for themselves.

    Proposed is what makes loads more equal by enough to stay so, and saves more over the next hour
    than it costs while it lasts; often that is nothing. What a policy says of evacuations counts:
    who stays, labels, keep_free, how many at once.

    Examples:

        vmckpt balance --dry-run

        vmckpt balance --yes --json
    """
    from vmckpt.evacuation.task import Kind, Task

    order = Task(kind=Kind.BALANCE, policy=policy)
    _ask(order, _Wishes(dry_run, yes, True, "", json), inventory, policies)


def _imagine(order: "Task", fleet: Path, policies: Path | None, *, json: bool) -> None:
    from vmckpt.app import evacuation as app_evacuation

    found = app_evacuation.emptied(fleet, order, policies)
    if json:
        output.print_json(found.as_json())
    else:
        show_plan(found.plan, output.out)
        show_plays(found)
    _refuse(found.plan, order, partly=False)


@dataclass(frozen=True, slots=True)
class _Wishes:
    """How the order is to be handled."""

    dry_run: bool
    yes: bool
    partly: bool
    why: str
    json: bool


def _ask(order: "Task", wishes: _Wishes, inventory: Path | None, folder: Path | None) -> None:
    from vmckpt.evacuation.task import Kind

    if not (wishes.dry_run or wishes.yes or sys.stdin.isatty()):
        raise BadInput("nobody is there to say yes to the plan", mend="add --yes, or --dry-run")
    report = asyncio.run(_run(order, wishes, inventory, folder))
    if report is None:
        return
    if wishes.json:
        output.print_json(report.as_json())
    else:
        show_report(report)
    left = report.ended.left
    if left:
        names = ", ".join(one.tenant.name for one in left[:4])
        more = f" and {len(left) - 4} more" if len(left) > 4 else ""
        where = {Kind.EVACUATE: f"still on {order.host}", Kind.REPOPULATE: "not back"}.get(
            order.kind, "not moved"
        )
        raise SomeLeft(f"{names}{more}: {where}", mend=left[0].mend)
    if report.bare:
        first = report.bare[0]
        raise SomeLeft(
            f"{first.guest}, which ran elsewhere, has no standby any more", mend=first.mend
        )


async def _run(
    order: "Task", wishes: _Wishes, inventory: Path | None, folder: Path | None
) -> "Report | None":
    from vmckpt.app import controller, evacuation
    from vmckpt.app.evacuation import Emptying

    abort = asyncio.Event()
    stop = stop_on_signals(
        "stopping: nothing new begins; what is on its way arrives (once more: it goes back)",
        "what is on its way goes back", abort,
    )  # fmt: skip
    known = controller.load_inventory(inventory)
    shelf, forced = with_policy(known, folder, order.policy)
    order = replace(order, policy=forced)
    story = Story()
    caller = controller.Caller(emit=story.take, warn=output.say, stop=stop)
    if not wishes.dry_run:
        await evacuation.put_in_order(known, shelf, caller)
    async with Emptying(known, shelf, order, caller) as emptying:
        with story.looking(f"looking at {len(known.hosts)} hosts and their guests"):
            plan = await emptying.plan()
        if wishes.dry_run and wishes.json:
            output.print_json(plan.as_json())
        elif not wishes.json or sys.stdin.isatty():
            show_plan(plan, output.out if not wishes.json else output.err)
        if wishes.dry_run:
            _refuse(plan, order, partly=False)
            return None
        _refuse(plan, order, partly=wishes.partly)
        # Nothing else is under way: who presses Ctrl-C at the question wants to leave it.
        if not wishes.yes and not _agreed(order):
            output.say("nothing was changed")
            raise typer.Exit(130)
        with story.going(f"{order.kind} {order.host}"):
            return await emptying.carry_out(plan, wishes.why, abort)


def with_policy(
    known: "controller.Inventory", folder: Path | None, policy: str | None
) -> tuple[tuple[Policy, ...], str | None]:
    """All policies, that of a file among them, and the name of the one asked for."""
    from vmckpt.app import policies as app_policies

    shelf, forced = app_policies.load_policies(known, folder, policy)
    if forced is not None and policy != forced:  # a file: the others are needed, too
        rest = app_policies.load_policies(known, folder)[0]
        shelf = (*shelf, *(one for one in rest if one.name != forced))
    return tuple(shelf), forced


def _refuse(plan: "Plan", order: "Task", *, partly: bool) -> None:
    """Raise Blocked if somebody has no place to go to."""
    from vmckpt.evacuation.task import Kind

    if not plan.left or partly:
        return
    first = plan.left[0]
    many = f"{len(plan.left)} guests have" if len(plan.left) > 1 else "one guest has"
    raise Blocked(
        f"{many} no place to go to: {first.tenant.name}: {first.why}; nothing was changed",
        mend=f"{first.mend}; or --partly moves the others"
        if order.kind is Kind.EVACUATE else f"{first.mend}; or --partly brings back the others",
    )  # fmt: skip


def _agreed(order: "Task") -> bool:
    from vmckpt.evacuation.task import Kind

    what = {Kind.EVACUATE: "empty it", Kind.REPOPULATE: "fill it"}.get(order.kind, "move them")
    stops = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return typer.confirm(f"{order.host}: {what} like this?", err=True)
    except typer.Abort:
        return False
    finally:
        signal.signal(signal.SIGINT, stops)
