"""vmckpt snapshot restore."""

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import INVENTORY, JSON
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import IDENTITY, STORES, Ticker, identity_of
from vmckpt.errors import HookFailed
from vmckpt.units import show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.catalog import Identity
    from vmckpt.snapshot.group.restore import GroupRestored
    from vmckpt.snapshot.request import Restored, RestoreRequest


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command()(restore)


def restore(
    snapshot: Annotated[
        str, typer.Argument(metavar="SNAPSHOT", help="ID or name of a snapshot, or ID of a group.")
    ],
    on: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Target host. Default: the host on which the snapshot was taken.",
            autocompletion=arguments.hosts,
        ),
    ] = None,
    as_: Annotated[
        str | None,
        typer.Option("--as", metavar="NAME", help="Restore as a fork: a new guest with this name."),
    ] = None,
    folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for a fork's disks on the host.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Bring a fork's links up, with MACs of its own.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Destroy the guest if it is running, and overwrite its disks; later changes"
            " are lost.",
        ),
    ] = False,
    paused: Annotated[bool, typer.Option("--paused", help="Leave the guest paused.")] = False,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Start the guest first, then fill memory and disks.")
    ] = False,
    trust_definition: Annotated[
        bool,
        typer.Option(
            "--trust-definition",
            help="Accept all host files, devices and programs used by the definition.",
        ),
    ] = False,
    on_restore: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Shell command to run on this machine after the restore."),
    ] = None,
    identity: IDENTITY = None,
    store: STORES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Restore a guest's disks and memory from a snapshot.

    To restore a guest in place, the guest must not be running and its disks must not exist, unless
    --replace is given. If the restore fails after the guest was destroyed, its previous disks are
    restored and the guest stays off; the error reports this.

    With --as, the snapshot becomes a fork: a new guest with its own name, UUID and MAC addresses,
    consoles and screens. The network links of the fork are down unless --link is given.

    A fork with memory runs with the MAC and IP addresses of its original until they are changed in
    the guest. The guest agent changes the MAC addresses, and QEMU confirms them. Only then does
    --link bring the links up. If the agent cannot change them, the links stay down and the exit
    code is 24; the error names the commands that connect the fork. The IP addresses are kept, with
    a warning: change them with --on-restore if both guests are on one network.

    With --lazy, the guest runs as soon as its device state is loaded, whatever the size of its
    memory and of its qcow2 disks. It waits whenever it needs data that has not been copied yet. A
    keeper process on the guest's host serves the data, and continues if this command or the host's
    agent is killed. If the keeper is killed, another one is started within seconds.

    --on-restore runs a command that adapts other systems when a guest goes back in time: a queue, a
    lock, a cluster. The command runs as soon as the guest is restored, and before a fork's links
    are up. Its environment contains VMCKPT_GUEST, _UUID, _HOST, _ORIGIN, _SNAPSHOT, _NAME, _STORE,
    _MADE_AT and _FORK. If the command fails, the guest is kept, a fork's links stay down, and the
    exit code is 24.

    The definition in a snapshot was written by the host that took the snapshot. A definition that
    uses more host resources than an ordinary guest is therefore refused, and the error names each
    such element. Elements that the guest on the target host already has are accepted;
    --trust-definition accepts all elements.

    A group is restored as a unit: no guest is destroyed before all guests can be restored, and no
    guest resumes before all guests are restored.

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
        raise HookFailed(text, hint="run the command by hand")
    if isinstance(done, Restored) and done.links_down:
        raise HookFailed(done.links_down)


def _show(done: "Restored", *, paused: bool) -> None:
    for warning in done.warnings:
        output.say(f"warning: {warning}")
    for disk, base in done.bases.items():
        output.out.print(f"disk {disk} is an overlay of {base}, with the data that differs from it")
    if not done.runs:
        output.out.print(
            f"{done.guest} is defined on {done.host} and is off, because the snapshot contains no"
            f" memory; disks written in {show_seconds(done.disks)}"
        )
        return
    how = "is restored and paused" if paused else "is running"
    output.out.print(
        f"{done.guest} {how} on {done.host}: disks written in {show_seconds(done.disks)},"
        f" memory loaded in {show_seconds(done.memory)}"
    )
    if done.clock_not_set and not paused:
        output.out.print(
            "its clock has the time of the snapshot until NTP or an administrator sets it:"
            f" {done.clock_not_set}"
        )
    if not done.whole:
        output.say(
            f"{done.guest}'s memory and disks are being copied in the background; to watch, run"
            " vmckpt recover"
        )


async def _restore(
    inventory: "controller.Inventory",
    store: str | None,
    request: "RestoreRequest",
    on: str | None,
    key: "Identity | None",
) -> "Restored | GroupRestored":
    from vmckpt.app import controller, snapshot_restore
    from vmckpt.snapshot.group import rules

    whole = rules.is_id(request.snapshot)
    becomes = "the state of each guest will be shown" if whole else "undoing the restore"
    stop = stop_on_signals(f"stopping: {becomes}")
    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    back = snapshot_restore.restore_group if whole else snapshot_restore.restore
    return await back(acting, store, request, on=on, identity=key)
