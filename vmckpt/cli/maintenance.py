"""vmckpt maintenance and roll."""

import asyncio
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import HOST, INVENTORY, JSON, POLICIES, help_alone, seconds
from vmckpt.cli.evacuate import Story, show_plan, show_report, with_policy
from vmckpt.cli.output import stop_on_signals
from vmckpt.errors import BadInput
from vmckpt.journal import wording
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.app.rolling_maintenance import Rolled, RollingOptions


app = typer.Typer(name="maintenance", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def maintenance_options(context: typer.Context) -> None:
    """Show and set which hosts are in maintenance.

    No guest is placed on a host in maintenance.
    """
    help_alone(context)


@app.command("list")
def list_(json: JSON = False) -> None:
    """List hosts in maintenance, with the start, the user and the reason.

    Example:

        vmckpt maintenance list --json
    """
    from vmckpt.app import evacuation

    found = evacuation.maintained()
    if json:
        output.print_json(
            [
                {"host": one.host, "job": one.job, "since": _when(one.since),
                 "asked_by": one.asked_by, "why": one.why or None}
                for one in found
            ]
        )  # fmt: skip
        return
    if not found:
        output.say("no host is in maintenance")
        return
    now = time.time()
    table = output.table("host", "since", "asked by", "why")
    for one in found:
        table.add_row(one.host, wording.clock(one.since, now), one.asked_by, one.why or "–")
    output.out.print(table)


@app.command()
def enter(
    host: HOST,
    why: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason, shown by vmckpt maintenance list.")
    ] = "",
    inventory: INVENTORY = None,
) -> None:
    """Put a host into maintenance, so that no guest is placed on it.

    Guests stay on the host; to move them off, use vmckpt evacuate.

    Example:

        vmckpt maintenance enter alpha --why "kernel"
    """
    from vmckpt.app import evacuation

    held, new = evacuation.enter(_known(inventory), host, why)
    said = (
        "is in maintenance" if new else f"is already in maintenance, requested by {held.asked_by}"
    )
    output.say(f"{held.host} {said}")


@app.command()
def leave(host: HOST, inventory: INVENTORY = None) -> None:
    """Take a host out of maintenance, so that guests can be placed on it.

    No guest is moved; to move evacuated guests back, use vmckpt repopulate.

    Example:

        vmckpt maintenance leave alpha
    """
    from vmckpt.app import evacuation

    held = evacuation.leave(_known(inventory), host)
    output.say(f"{held.host} accepts guests again")


def _known(path: Path | None) -> "controller.Inventory":
    from vmckpt.app import controller

    return controller.load_inventory(path)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


roll_app = typer.Typer(name="roll", rich_markup_mode=None, add_completion=False)


@roll_app.command()
def roll(
    hosts: Annotated[
        list[str],
        typer.Argument(metavar="HOST", help="Hosts, in order.", autocompletion=arguments.hosts),
    ],
    run: Annotated[
        str, typer.Option(metavar="CMD", help="Shell command to run on each host once it is empty.")
    ],
    before: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Shell command to run on each host before its first guest leaves."
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Shell command to run on each host once its guests are back."
        ),
    ] = None,
    limit: Annotated[
        Seconds, typer.Option(parser=seconds, metavar="TIME", help="Time limit for each command.")
    ] = "30m",  # type: ignore[assignment]
    healthy_in: Annotated[
        Seconds,
        typer.Option(
            parser=seconds, metavar="TIME", help="Time limit for the host to become healthy again."
        ),
    ] = "15m",  # type: ignore[assignment]
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Policy for all guests. Default: each guest's own policy; if it has none, the"
            " policy maintenance.",
        ),
    ] = None,
    why: Annotated[
        str, typer.Option(metavar="TEXT", help="Reason, shown by vmckpt maintenance list.")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Maintain hosts in turn: evacuate, run a command, repopulate.

    The command may reboot the host; the lost connection is not an error. The commands of --before
    and --after must not reboot the host. Guests are moved back once the host is healthy, that is,
    once two runs of vmckpt doctor in a row find no blocker. The run ends at the first failure: the
    failed host stays in maintenance if its evacuation had started, and the maintenance of earlier
    hosts is complete. If you run vmckpt roll again, empty hosts are not evacuated again, but the
    commands run on them again.

    Examples:

        vmckpt roll alpha beta --run "apt-get -y upgrade && systemctl reboot"

        vmckpt roll alpha --run /root/new-firmware --healthy-in 30m --yes

        vmckpt roll alpha --before ./silence --run reboot --after ./unsilence
    """
    from vmckpt.app.rolling_maintenance import RollingOptions

    if not yes and not sys.stdin.isatty():
        raise BadInput("stdin is not a terminal, so no confirmation is possible", hint="add --yes")
    if not yes:
        commands = ", then ".join(one for one in (before, run, after) if one)
        typer.confirm(f"{', then '.join(hosts)}: {commands}?", err=True, abort=True)
    options = RollingOptions(
        command=run, before=before, after=after, policy=policy, limit=limit,
        healthy_in=healthy_in, why=why,
    )  # fmt: skip
    done = asyncio.run(_run(hosts, options, inventory, policies, json=json))
    if json:
        output.print_json([one.as_json() for one in done])
        return
    for one in done:
        show_report(one.emptied)
        if one.filled is not None:
            show_report(one.filled)


async def _run(
    hosts: list[str],
    options: "RollingOptions",
    inventory: Path | None,
    folder: Path | None,
    *,
    json: bool,
) -> "list[Rolled]":
    from vmckpt.app import controller, evacuation, rolling_maintenance

    abort = asyncio.Event()
    stop = stop_on_signals(
        "stopping: waiting for running moves (press Ctrl-C again to cancel them)",
        "cancelling running moves", abort,
    )  # fmt: skip
    known = controller.load_inventory(inventory)
    shelf, forced = with_policy(known, folder, options.policy)
    options = replace(options, policy=forced)
    story = Story()
    caller = controller.Caller(emit=story.take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=known, policies=shelf, caller=caller)
    await evacuation.put_in_order(acting)
    with story.going(f"roll {', '.join(hosts)}"):
        return await rolling_maintenance.roll(
            acting, hosts, options, abort=abort,
            # The live panel on stderr would overwrite a plan on stdout, so both use one console.
            show=lambda plan: show_plan(
                plan, output.err if json or output.err.is_terminal else output.out
            ),
        )  # fmt: skip
