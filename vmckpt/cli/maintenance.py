"""vmckpt maintenance: which hosts take no guests."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import HOST, INVENTORY, JSON, help_alone
from vmckpt.journal import wording

if TYPE_CHECKING:
    from vmckpt.app import controller

app = typer.Typer(name="maintenance", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def maintenance_options(context: typer.Context) -> None:
    """Which hosts are in maintenance: nothing new is placed on them."""
    help_alone(context)


@app.command("list")
def list_(json: JSON = False) -> None:
    """Hosts that are in maintenance, since when, and who asked for it.

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
    why: Annotated[str, typer.Option(help="For whoever wonders.")] = "",
    inventory: INVENTORY = None,
) -> None:
    """Place nothing new on a host; guests that are there stay (vmckpt evacuate moves them).

    Example:

        vmckpt maintenance enter alpha --why "kernel"
    """
    from vmckpt.app import evacuation

    held, new = evacuation.enter(_known(inventory), host, why)
    said = "is in maintenance" if new else f"was in maintenance already, by {held.asked_by}"
    output.say(f"{held.host} {said}")


@app.command()
def leave(host: HOST, inventory: INVENTORY = None) -> None:
    """The host may take guests again; nobody is moved (vmckpt repopulate brings them back).

    Example:

        vmckpt maintenance leave alpha
    """
    from vmckpt.app import evacuation

    held = evacuation.leave(_known(inventory), host)
    output.say(f"{held.host} may take guests again")


def _known(path: Path | None) -> "controller.Inventory":
    from vmckpt.app import controller

    return controller.load_inventory(path)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
