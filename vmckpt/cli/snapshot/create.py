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
from vmckpt.units import Seconds, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.group.create import GroupTaken
    from vmckpt.snapshot.request import Taken, TakeRequest


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(create)


def create(
    guest: Annotated[
        str | None,
        typer.Argument(
            metavar="GUEST", help="Name or UUID of the guest.", autocompletion=arguments.guests
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the snapshot. Default: the time.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory/--no-memory", help="Include the memory, or only the disks.")
    ] = True,
    way: Annotated[MemoryMethod, typer.Option(help="How to capture memory.")] = MemoryMethod.AUTO,
    group: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Guests to capture at the same instant.")
    ] = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Take a snapshot of a guest.

    The guest is usually paused for only a few milliseconds; its memory is read while it is running.
    Ctrl-C abandons the snapshot: the guest is unchanged, and nothing is added to the store.

    --no-memory captures only the disks. This also works for a guest that is off, but the guest
    cannot be started until the snapshot is complete. If the guest has a guest agent, the agent
    freezes the file systems at the moment of the snapshot. Without an agent, the file systems in
    the snapshot are in the same state as after a power failure.

    --way tracking tracks which pages the guest writes, from outside QEMU. A process on the host
    does this until the guest stops, and the next snapshot reads only the written pages. --way
    background uses QEMU's background snapshot, and ends the tracking. --way shared is for guests
    whose memory is a shared file on the host. The host then keeps a copy as large as the memory
    until the guest stops, and each snapshot compares the memory with it. --way auto uses tracking
    if the host supports it (see vmckpt doctor), else shared if such a copy exists, else background.
    If none of them works, --way auto uses libvirt's memory snapshot, during which the guest is
    paused.

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
        told = "neither a guest nor a group is" if guest is None else "both a guest and a group are"
        raise BadInput(f"{told} named", hint="name one guest, or several with --group web1,db1")
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

    acting = _controller(inventory, "stopping: abandoning the snapshot")
    return await snapshots.take(acting, store, request)


async def _create_group(
    inventory: "controller.Inventory", store: str | None, group: str, request: "TakeRequest"
) -> "GroupTaken":
    from vmckpt.app import snapshots

    acting = _controller(inventory, "stopping: abandoning the snapshots")
    return await snapshots.take_group(acting, store, group.split(","), request)


def _show_group(cut: "GroupTaken") -> None:
    for one in cut.members:
        _show_taken(one)
    held = max(one.held or 0.0 for one in cut.members)
    output.out.print(
        f"{cut.id}: {show_count(len(cut.members), 'guest')} captured at one instant;"
        f" output was buffered for at most {show_seconds(Seconds(held))}"
    )


def _show_taken(taken: "Taken") -> None:
    for warning in taken.warnings:
        output.say(f"warning: {warning}")
    output.out.print(
        f"{taken.id} {taken.name}: {taken.guest} on {taken.host}, stored in {taken.store};"
        f" paused for {show_seconds(taken.pause)}, done in {show_seconds(taken.took)}"
    )
    output.out.print(f"method: {taken.way} ({taken.why})")
    lock = "encrypted" if taken.encrypted else "not encrypted: no administrator's key was added"
    output.out.print(
        f"{show_bytes(taken.read)} read, {show_bytes(taken.same)} unchanged,"
        f" {show_bytes(taken.written)} written, {lock}"
    )
