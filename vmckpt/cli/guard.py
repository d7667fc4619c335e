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
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="What may harm it.")],
    check: Annotated[
        str | None, typer.Option(metavar="CMD", help="Ends with 0 if all is well; run by a shell.")
    ] = None,
    check_for: Annotated[
        Seconds | None,
        typer.Option(
            parser=seconds, metavar="TIME", help="The check is tried again for so long; else 60s."
        ),
    ] = None,
    drop: Annotated[
        bool, typer.Option("--drop/--keep", help="Delete the checkpoint if all is well.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="What it is called; else the time.")] = None,
    on_restore: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Run here once the guest went back; see restore."),
    ] = None,
    identity: IDENTITY = None,
    store: STORE = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Run a risky command under guard: if it or the check fails, the guest goes back.

    A checkpoint of memory and disks is taken, and it is tried that it could be restored here; then
    the command is run, on this machine. If it ends with 0, the guest runs and the check ends with
    0, the checkpoint stays, tagged "guard". Else, or after Ctrl-C, the guest is put back where it
    was: what it did since is lost. Both find VMCKPT_GUEST, VMCKPT_HOST and VMCKPT_SNAPSHOT.

    Ends with 0 if all is well, 23 if the guest went back, 130 if it did so after Ctrl-C. If vmckpt
    is killed, nothing is taken back: vmckpt recover says how.

    Examples:

        vmckpt guard web1 --check 'curl -sf http://web1/' -- ssh web1 apt-get -y upgrade

        vmckpt guard db1 --check 'pg_isready -h db1' --check-for 5m --drop -- ./new-firmware.sh
    """
    from vmckpt.app import controller
    from vmckpt.snapshot.guard import Outside
    from vmckpt.snapshot.guard_rules import CHECK_FOR, Ending, GuardRequest

    if not command:
        raise BadInput("no command to be guarded", hint="add it after --")
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
        output.out.print(f"all is well with {done.taken.guest}; its checkpoint is {fate}")


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
    """Set by a signal, which also reaches the command: the terminal's Ctrl-C does so by itself.

    A second one ends the command at once.
    """
    stop = asyncio.Event()

    def stopped(number: int) -> None:
        if stop.is_set():
            outside.pass_on(signal.SIGKILL)  # a command that hears nothing keeps nobody waiting
            output.say("still at it: the guest is not left half way")
        else:
            if not (number == signal.SIGINT and sys.stdin.isatty()):
                outside.pass_on(number)
            output.say("stopping: the guest will be as it was")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopped, number)
    return stop


def ended(done: "GuardResult") -> VmckptError | None:
    """What the command ends with; None if all is well."""
    if done.restored is None:
        return None
    where = f"{done.taken.guest} is as it was at {done.taken.id}"
    if done.stopped:
        return Cancelled(f"stopped; {where}")
    if done.restored.hook:
        return HookFailed(f"{done.why}; {where}, but on_restore ended with {done.restored.hook}")
    return GuardRolledBack(f"{done.why}; {where} (it took {show_seconds(done.restored.took)})")
