"""vmckpt guard."""

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON, seconds
from vmckpt.cli.snapshot.options import IDENTITY, STORE, Ticker, identity_of
from vmckpt.errors import BadInput, Cancelled, GuardRolledBack, HookFailed, VmckptError
from vmckpt.units import Seconds, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.snapshot.catalog import Identity
    from vmckpt.snapshot.guard import Outside
    from vmckpt.snapshot.guard_rules import GuardRequest, GuardResult

app = typer.Typer(name="guard", rich_markup_mode=None, add_completion=False)


@app.command()
def guard(
    guest: GUEST,
    command: Annotated[
        list[str], typer.Argument(metavar="CMD", help="Risky command to run on this machine.")
    ],
    check: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Shell command; exits with 0 if the guest is healthy."),
    ] = None,
    check_for: Annotated[
        Seconds | None,
        typer.Option(
            parser=seconds, metavar="TIME", help="Retry the check for this long. Default: 60s."
        ),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop/--keep", help="Delete the checkpoint on success.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the checkpoint. Default: the time.")
    ] = None,
    on_restore: Annotated[
        str | None,
        typer.Option(
            metavar="CMD", help="Shell command to run after a restore; see snapshot restore."
        ),
    ] = None,
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Run a risky command; if it fails, restore the guest.

    First, vmckpt takes a checkpoint of memory and disks, and tests that the checkpoint can be
    restored. Then it runs the command on this machine, and then the check. If both exit with 0 and
    the guest is running, the checkpoint is kept with the tag "guard"; --drop deletes it. Otherwise,
    or after Ctrl-C, the guest is restored to the checkpoint, and all later changes are lost. The
    environment of the command and the check contains VMCKPT_GUEST, VMCKPT_HOST and VMCKPT_SNAPSHOT.

    Exit codes: 0 on success, 23 if the guest was restored, 24 if the --on-restore command then
    failed, 130 if the guest was restored after Ctrl-C. If vmckpt is killed, the guest is not
    restored; vmckpt recover shows how to restore it.

    Examples:

        vmckpt guard web1 --check 'curl -sf web1' -- ssh web1 apt-get -y upgrade

        vmckpt guard db1 --check ./db-ok --check-for 5m --drop -- ./new-firmware
    """
    from vmckpt.app import controller
    from vmckpt.snapshot.guard import Outside
    from vmckpt.snapshot.guard_rules import CHECK_FOR, Ending, GuardRequest

    if not command:
        raise BadInput("no command to run", hint="add the command after --")
    known = controller.load_inventory(inventory)
    request = GuardRequest(
        guest=guest, command=tuple(command), name=name, check=check,
        check_for=check_for or CHECK_FOR, drop=drop, on_restore=on_restore,
    )  # fmt: skip
    done = asyncio.run(_guard(known, store, request, identity_of(identity), Outside(quiet=json)))
    if json:
        output.print_json(done.as_json())
    if (failed := ended(done)) is not None:
        raise failed
    if not json:
        fate = "deleted" if done.ending is Ending.DROPPED else f"kept as {done.taken.id}"
        output.out.print(f"{done.taken.guest}: the command succeeded; the checkpoint is {fate}")


async def _guard(
    inventory: "controller.Inventory", store: str | None, request: "GuardRequest",
    key: "Identity | None", outside: "Outside",
) -> "GuardResult":  # fmt: skip
    from vmckpt.app import controller
    from vmckpt.app import guard as app_guard

    stop = stop_of(outside)
    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    return await app_guard.guard(acting, store, request, identity=key, outside=outside)


def stop_of(outside: "Outside") -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM and SIGHUP set; the command gets the signal as well.

    Ctrl-C is not passed on, because the terminal sends it to the command. A second signal kills the
    command.
    """
    stop = asyncio.Event()

    def stopped(number: int) -> None:
        if stop.is_set():
            outside.pass_on(signal.SIGKILL)  # do not wait for a command that ignores signals
            output.say("still stopping; a restore of the guest cannot be interrupted")
        else:
            if not (number == signal.SIGINT and sys.stdin.isatty()):
                outside.pass_on(number)
            output.say("stopping: if the command was started, the guest will be restored")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopped, number)
    return stop


def ended(done: "GuardResult") -> VmckptError | None:
    """Return the error with which the command exits, or None if it succeeded."""
    if done.restored is None:
        return None
    where = f"{done.taken.guest} was restored to {done.taken.id}"
    if done.stopped:
        return Cancelled(f"stopped; {where}")
    if done.restored.hook:
        return HookFailed(
            f"{done.why}; {where}, but the --on-restore command exited with {done.restored.hook}"
        )
    return GuardRolledBack(f"{done.why}; {where} in {show_seconds(done.restored.took)}")
