"""vmckpt snapshot create."""

import asyncio
from typing import Annotated

import typer

from vmckpt import api
from vmckpt.api import snapshots
from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.signals import stop_on_signals
from vmckpt.cli.snapshot_options import STORE, Ticker
from vmckpt.snapshot.requests import Taken, TakeRequest
from vmckpt.units import show_bytes, show_seconds


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    app.command()(create)


def create(
    guest: Annotated[str, typer.Argument(help="Its name or UUID.")],
    name: Annotated[str | None, typer.Option(help="What it is called; else the time.")] = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Take a snapshot of a running guest.

    The guest stands still for some milliseconds only; its memory is read while it runs on. Ctrl-C
    gives it up: the guest is as it was, and nothing is in the store.

    Examples:

        vmckpt snapshot create web1

        vmckpt snapshot create web1 --name before-upgrade --json
    """
    known = api.load_inventory(inventory)
    request = TakeRequest(guest=guest, name=name)
    taken = asyncio.run(_create(known, store, request))
    if json:
        output.print_json(taken.as_json())
    else:
        _show_taken(taken)


async def _create(inventory: api.Inventory, store: str | None, request: TakeRequest) -> Taken:
    stop = stop_on_signals("stopping: the guest will be as it was")
    caller = api.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    return await snapshots.take(inventory, store, request, caller)


def _show_taken(taken: Taken) -> None:
    for warning in taken.warnings:
        output.say(f"warning: {warning}")
    output.out.print(
        f"{taken.id} {taken.name}: {taken.guest} on {taken.host}, into {taken.store};"
        f" stood still for {show_seconds(taken.pause)}, done in {show_seconds(taken.took)}"
    )
    lock = "encrypted" if taken.encrypted else "not encrypted: no administrator's key is known"
    output.out.print(
        f"{show_bytes(taken.read)} read, {show_bytes(taken.same)} as before,"
        f" {show_bytes(taken.written)} written, {lock}"
    )
