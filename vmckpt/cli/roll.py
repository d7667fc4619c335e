"""vmckpt roll."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import completing, output
from vmckpt.cli.arguments import INVENTORY, JSON, POLICIES, seconds
from vmckpt.cli.evacuate import with_policy
from vmckpt.cli.evacuate_show import Story, show_plan, show_report
from vmckpt.cli.signals import stop_on_signals
from vmckpt.errors import BadInput
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.app.rolling_maintenance import Rolled, Wishes

app = typer.Typer(name="roll", rich_markup_mode=None, add_completion=False)


@app.command()
def roll(
    hosts: Annotated[
        list[str],
        typer.Argument(metavar="HOST...", help="In this order.", autocompletion=completing.hosts),
    ],
    run: Annotated[
        str, typer.Option(metavar="CMD", help="By a shell on each host once it is empty.")
    ],
    before: Annotated[
        str | None, typer.Option(metavar="CMD", help="The same before its first guest leaves.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="CMD", help="The same once its guests are back.")
    ] = None,
    limit: Annotated[
        Seconds, typer.Option(parser=seconds, metavar="TIME", help="Each CMD may take that long.")
    ] = "30m",  # type: ignore[assignment]
    healthy_in: Annotated[
        Seconds,
        typer.Option(parser=seconds, metavar="TIME", help="And to be well again after it."),
    ] = "15m",  # type: ignore[assignment]
    policy: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="As for vmckpt evacuate.")
    ] = None,
    why: Annotated[str, typer.Option(help="For whoever wonders why a host is closed.")] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Host after host: empty it, run a command on it, wait until it is well, bring guests back.

    The command may reboot the host (that breaks the connection, which is no error); --before and
    --after must not. Well is what vmckpt doctor has nothing against. The first host that goes wrong
    is the last one, and stays in maintenance if it was to be emptied; those before it are done.
    Begun again, hosts that are empty already are not emptied again, but commands run there once
    more.

    Examples:

        vmckpt roll alpha beta --run "apt-get -y dist-upgrade && systemctl reboot"

        vmckpt roll alpha --run /usr/local/sbin/new-firmware --healthy-in 30m --yes

        vmckpt roll alpha --before "silence alpha" --run "systemctl reboot" --after "speak alpha"
    """
    from vmckpt.app.rolling_maintenance import Wishes

    if not yes and not sys.stdin.isatty():
        raise BadInput("nobody is there to say yes", mend="add --yes")
    if not yes:
        commands = ", then ".join(one for one in (before, run, after) if one)
        typer.confirm(f"{', then '.join(hosts)}: {commands}?", err=True, abort=True)
    wishes = Wishes(
        command=run, before=before, after=after, policy=policy, limit=limit,
        healthy_in=healthy_in, why=why,
    )  # fmt: skip
    done = asyncio.run(_run(hosts, wishes, inventory, policies, json=json))
    if json:
        output.print_json([one.as_json() for one in done])
        return
    for one in done:
        show_report(one.emptied)
        if one.filled is not None:
            show_report(one.filled)


async def _run(
    hosts: list[str], wishes: "Wishes", inventory: Path | None, folder: Path | None, *, json: bool
) -> "list[Rolled]":
    from vmckpt.app import controller, evacuation, rolling_maintenance

    abort = asyncio.Event()
    stop = stop_on_signals(
        "stopping: nothing new begins; what is on its way arrives (once more: it goes back)",
        "what is on its way goes back", abort,
    )  # fmt: skip
    known = controller.load_inventory(inventory)
    shelf, forced = with_policy(known, folder, wishes.policy)
    wishes = replace(wishes, policy=forced)
    story = Story()
    caller = controller.Caller(emit=story.take, warn=output.say, stop=stop)
    await evacuation.put_in_order(known, shelf, caller)
    with story.going(f"roll {', '.join(hosts)}"):
        return await rolling_maintenance.roll(
            known, shelf, hosts, wishes, caller, abort=abort,
            # What is shown besides on a terminal would erase what another console has written.
            show=lambda plan: show_plan(
                plan, output.err if json or output.err.is_terminal else output.out
            ),
        )  # fmt: skip
