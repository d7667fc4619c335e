"""vmckpt snapshot create."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.agent.snapshot.choose_method import MemoryMethod
from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import STORE, Ticker
from vmckpt.errors import BadInput
from vmckpt.units import Seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.group.create import GroupTaken
    from vmckpt.snapshot.request import Taken, TakeRequest


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    app.command()(create)


def create(
    guest: Annotated[
        str | None, typer.Argument(help="Its name or UUID.", autocompletion=arguments.guests)
    ] = None,
    name: Annotated[str | None, typer.Option(help="What it is called; else the time.")] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Its memory, too, or its disks only.")
    ] = True,
    way: Annotated[MemoryMethod, typer.Option(help="How memory is captured.")] = MemoryMethod.AUTO,
    group: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Several guests, as one consistent cut.")
    ] = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Take a snapshot of a guest.

    The guest stands still for some milliseconds only; its memory is read while it runs on. Ctrl-C
    gives it up: the guest is as it was, and nothing is in the store.

    With --no-memory its disks only, also of a guest that is off, which cannot be started meanwhile.
    A guest agent holds file systems still for the instant; without one they are as after a power
    cut.

    --way background is QEMU's background snapshot. --way shared is for memory that vmckpt prepare
    made a file: its host keeps a copy, as large as the memory, until the guest ends or --way
    background is said, and each snapshot reads only what has changed. auto goes on in that way
    where a copy is there, takes the background otherwise, and libvirt's own memory snapshot, for
    which the guest stands still, where that does not work.

    Examples:

        vmckpt snapshot create web1

        vmckpt snapshot create web1 --name before-upgrade --json

        vmckpt snapshot create web1 --no-memory

        vmckpt snapshot create web1 --way shared

        vmckpt snapshot create --group web1,web2,db1 --name before-upgrade
    """
    from vmckpt.app import controller
    from vmckpt.snapshot.request import TakeRequest

    if (guest is None) == (group is None):
        told = "neither a guest" if guest is None else "both a guest"
        also = "nor" if guest is None else "and"
        raise BadInput(
            f"{told} {also} a group is named", hint="name a guest, or several with --group web1,db1"
        )
    known = controller.load_inventory(inventory)
    request = TakeRequest(guest=guest or "", name=name, memory=memory, way=way)
    if group is not None:
        cut = asyncio.run(_create_group(known, store, group, request))
        if json:
            output.print_json(cut.as_json())
        else:
            _show_group(cut)
        return
    taken = asyncio.run(_create(known, store, request))
    if json:
        output.print_json(taken.as_json())
    else:
        _show_taken(taken)


def _controller(inventory: "controller.Inventory", words: str) -> "controller.Controller":
    from vmckpt.app import controller

    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop_on_signals(words))
    return controller.Controller(inventory=inventory, caller=caller)


async def _create(
    inventory: "controller.Inventory", store: str | None, request: "TakeRequest"
) -> "Taken":
    from vmckpt.app import snapshots

    acting = _controller(inventory, "stopping: the guest will be as it was")
    return await snapshots.take(acting, store, request)


async def _create_group(
    inventory: "controller.Inventory", store: str | None, group: str, request: "TakeRequest"
) -> "GroupTaken":
    from vmckpt.app import snapshots

    acting = _controller(inventory, "stopping: the guests will be as they were")
    return await snapshots.take_group(acting, store, group.split(","), request)


def _show_group(cut: "GroupTaken") -> None:
    for one in cut.members:
        _show_taken(one)
    held = max(one.held or 0.0 for one in cut.members)
    output.out.print(
        f"{cut.id}: {len(cut.members)} guests as one cut; what they sent was held for"
        f" {show_seconds(Seconds(held))} at the most"
    )


def _show_taken(taken: "Taken") -> None:
    for warning in taken.warnings:
        output.say(f"warning: {warning}")
    output.out.print(
        f"{taken.id} {taken.name}: {taken.guest} on {taken.host}, into {taken.store};"
        f" stood still for {show_seconds(taken.pause)}, done in {show_seconds(taken.took)}"
    )
    output.out.print(f"way: {taken.way} ({taken.why})")
    lock = "encrypted" if taken.encrypted else "not encrypted: no administrator's key is known"
    output.out.print(
        f"{show_bytes(taken.read)} read, {show_bytes(taken.same)} as before,"
        f" {show_bytes(taken.written)} written, {lock}"
    )
