"""vmckpt snapshot restore."""

import asyncio
from typing import Annotated

import typer

from vmckpt import api
from vmckpt.api import snapshots
from vmckpt.cli import output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.signals import stop_on_signals
from vmckpt.cli.snapshot_options import IDENTITY, STORE, Ticker, identity_of
from vmckpt.snapshot.keeping import Identity
from vmckpt.snapshot.requests import Restored, RestoreRequest
from vmckpt.units import show_seconds


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    app.command()(restore)


def restore(
    snapshot: Annotated[str, typer.Argument(help="Its id, or its name.")],
    on: Annotated[str | None, typer.Option(metavar="HOST", help="Else where it was taken.")] = None,
    as_: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="As another guest: a fork.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where a fork's disks go, on that host.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="A fork's network is on.")] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="End the guest if it runs: what it did since is lost.")
    ] = False,
    paused: Annotated[bool, typer.Option("--paused", help="It does not run yet.")] = False,
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Bring a guest back as it was: its disks and its memory.

    In its old place the guest must not run, or be ended with --replace. As a fork it is another
    guest, with a name, UUID and MACs of its own, and its network off unless --link is said.

    Examples:

        vmckpt snapshot restore s-n2jxhlfmmrfavwmo --replace

        vmckpt snapshot restore s-n2jxhlfmmrfavwmo --as web1-test --on beta
    """
    known = api.load_inventory(inventory)
    request = RestoreRequest(
        snapshot=snapshot, fork=as_, folder=folder, link_up=link, end_running=replace, paused=paused
    )
    key = identity_of(identity)
    done = asyncio.run(_restore(known, store, request, on, key))
    if json:
        output.print_json(done.as_json())
        return
    for warning in done.warnings:
        output.say(f"warning: {warning}")
    output.out.print(
        f"{done.guest} runs on {done.host}: disks written in {show_seconds(done.disks)},"
        f" memory loaded in {show_seconds(done.memory)}"
    )


async def _restore(
    inventory: api.Inventory,
    store: str | None,
    request: RestoreRequest,
    on: str | None,
    key: Identity | None,
) -> Restored:
    stop = stop_on_signals("stopping: nothing of it will be left")
    caller = api.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    return await snapshots.restore(inventory, store, request, caller, on=on, identity=key)
