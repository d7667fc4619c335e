"""vmckpt snapshot restore."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import IDENTITY, STORE, Ticker, identity_of
from vmckpt.errors import HookFailed
from vmckpt.units import show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.catalog import Identity
    from vmckpt.snapshot.group.restore import GroupRestored
    from vmckpt.snapshot.request import Restored, RestoreRequest


def add_to(app: typer.Typer) -> None:
    """Make it a command of `app`."""
    app.command()(restore)


def restore(
    snapshot: Annotated[str, typer.Argument(help="Its id, or its name; or the id of a rules.")],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="HOST", help="Else where it was taken.", autocompletion=arguments.hosts
        ),
    ] = None,
    as_: Annotated[
        str | None, typer.Option("--as", metavar="NAME", help="As another guest: a fork.")
    ] = None,
    folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where a fork's disks go, on that host.")
    ] = None,
    link: Annotated[bool, typer.Option("--link", help="A fork's network is on.")] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="End the guest if it runs, write over its disks: what it did since is lost.",
        ),
    ] = False,
    paused: Annotated[bool, typer.Option("--paused", help="It does not run yet.")] = False,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="It runs at once, and its disks come in behind it.")
    ] = False,
    trust_definition: Annotated[
        bool,
        typer.Option(
            "--trust-definition",
            help="Start it whatever of the host its definition uses: files, devices, programs.",
        ),
    ] = False,
    on_restore: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Run here by a shell, once the guest is back."),
    ] = None,
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Bring a guest back as it was: its disks and its memory.

    In its old place the guest must not run and its disks must not be there, or --replace is said.
    If it fails after the guest was ended, its disks are as before, and it is off: it says so.

    As a fork it is another guest, with a name, UUID and MACs of its own, and its network off unless
    --link is said.

    --lazy is for large qcow2 disks: the guest runs as soon as its memory is there, and waits for
    what it reads. A keeper on its host goes on if this command, or the host's agent, ends; if the
    keeper does, the guest stands still until vmckpt recover, and nothing is lost.

    --on-restore is for what time going back does to others: a queue, a lock, a cluster's view. It
    is run as soon as the guest is back, and before a fork's network is on; it finds VMCKPT_GUEST,
    _UUID, _HOST, _ORIGIN, _SNAPSHOT, _NAME, _STORE, _MADE_AT and _FORK in its environment. If it
    fails, the guest stays, a fork's network stays off, and the command ends with 24.

    A definition that uses more of the host than a guest ordinarily does is refused, each element by
    name: the host that took the snapshot wrote it. What the guest on that host has already may
    stay; --trust-definition lets all of it pass.

    A group comes back as the one cut that it is: none of its guests is ended before all can be, and
    none runs before all are back.

    Examples:

        vmckpt snapshot restore s-n2jxhlfmmrfavwmo --replace

        vmckpt snapshot restore s-n2jxhlfmmrfavwmo --as web1-test --on beta

        vmckpt snapshot restore before-upgrade --replace --on-restore ./requeue

        vmckpt snapshot restore g-uq6nkk3ydjr4zqhe --replace
    """
    from vmckpt.app import controller
    from vmckpt.snapshot.group.restore import GroupRestored
    from vmckpt.snapshot.request import Restored, RestoreRequest
    from vmckpt.snapshot.restore import hook

    known = controller.load_inventory(inventory)
    request = RestoreRequest(
        snapshot=snapshot, fork=as_, folder=folder, link_up=link, end_running=replace,
        paused=paused, on_restore=on_restore, lazy=lazy, trust_definition=trust_definition,
    )  # fmt: skip
    key = identity_of(identity)
    done = asyncio.run(_restore(known, store, request, on, key))
    if json:
        output.print_json(done.as_json())
    else:
        for one in done.members if isinstance(done, GroupRestored) else (done,):
            _show(one, paused=paused)
    if isinstance(done, Restored) and done.hook and on_restore is not None:
        text = hook.hook_complaint(on_restore, done.hook, links_down=link and as_ is not None)
        raise HookFailed(text, hint="see to it by hand")


def _show(done: "Restored", *, paused: bool) -> None:
    for warning in done.warnings:
        output.say(f"warning: {warning}")
    if not done.runs:
        output.out.print(
            f"{done.guest} is defined on {done.host} and off, for the snapshot has no memory:"
            f" disks written in {show_seconds(done.disks)}"
        )
        return
    how = "is back, paused," if paused else "runs"
    output.out.print(
        f"{done.guest} {how} on {done.host}: disks written in {show_seconds(done.disks)},"
        f" memory loaded in {show_seconds(done.memory)}"
    )
    if not done.whole:
        output.say("its disks still come in, also without us; vmckpt recover watches that")


async def _restore(
    inventory: "controller.Inventory",
    store: str | None,
    request: "RestoreRequest",
    on: str | None,
    key: "Identity | None",
) -> "Restored | GroupRestored":
    from vmckpt.app import controller, snapshots
    from vmckpt.snapshot.group import rules

    whole = rules.is_id(request.snapshot)
    becomes = "it is told how each guest stands" if whole else "disks will be as before"
    stop = stop_on_signals(f"stopping: {becomes}")
    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    back = snapshots.restore_group if whole else snapshots.restore
    return await back(acting, store, request, on=on, identity=key)
