"""vmckpt fork: families of forks that continue from one snapshot."""

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import INVENTORY, JSON, help_alone
from vmckpt.cli.output import stop_on_signals
from vmckpt.cli.snapshot.options import IDENTITY, YES, Ticker, identity_of, sure
from vmckpt.errors import BadInput, HookFailed, HypervisorError
from vmckpt.snapshot.fork_rules import MOST, Keep
from vmckpt.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.app.forks import Doomed, Dropped, Kept, RunRequest, RunResult
    from vmckpt.snapshot.catalog import Identity
    from vmckpt.snapshot.fork_rules import ForkRequest, ForkTree, Ran
    from vmckpt.snapshot.forks import Started


class _Forks(typer.core.TyperGroup):
    """A group whose command "create" may be omitted: `vmckpt fork web1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["create", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(name="fork", cls=_Forks, invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def fork_options(context: typer.Context) -> None:
    """Start and manage families of forks of a guest.

    The forks of a family continue from one snapshot. They get its data when they need it, so each
    fork starts within a moment, and needs only the memory that it accesses.

    vmckpt fork GUEST is short for vmckpt fork create GUEST. For a guest whose name is that of a
    command, such as tree, type create.

    Examples:

        vmckpt fork web1 --count 16

        vmckpt fork tree
    """
    help_alone(context)


@app.command()
def create(
    source: Annotated[
        str,
        typer.Argument(
            metavar="GUEST|SNAPSHOT",
            help="Running guest, or ID or name of a snapshot with memory.",
            autocompletion=arguments.guests,
        ),
    ],
    count: Annotated[int, typer.Option(min=1, max=MOST, help="Number of forks.")] = 1,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX", help="Name the forks PREFIX-1, PREFIX-2, … Default: GUEST-fork."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Target host. Default: the host of the guest or of the snapshot.",
            autocompletion=arguments.hosts,
        ),
    ] = None,
    folder: Annotated[
        str | None, typer.Option(metavar="DIR", help="Directory for the disks on the host.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="CMD", help="Shell command to run on this machine for each fork."),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, help="How many commands run at a time. Default: one per CPU."),
    ] = None,
    keep: Annotated[Keep, typer.Option(help="Which forks stay after --run.")] = Keep.BEST,
    identity: IDENTITY = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Name of a store. Default: the first for a guest, all for a snapshot.",
        ),
    ] = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Start forks of a guest or snapshot that share memory and disks.

    Of a running guest, vmckpt first takes a snapshot with the tag "fork", which is deleted together
    with the last fork. The guest keeps running. Each fork has its own name, UUID and MAC addresses,
    and its links are down. A fork needs its family and the snapshot until it is made independent
    (vmckpt fork keep). A reboot of the host ends all other forks.

    --run runs a command on this machine for each fork. {} stands for the name of the fork; the
    environment contains VMCKPT_GUEST, _UUID, _HOST and _FAMILY. Then the best fork stays, and the
    others are dropped. The best is the one whose command exits with 0 and prints the highest number
    on its last line. If a successful command prints no number, the first that succeeded is best.
    --keep all drops none. Ctrl-C ends the commands and drops all forks.

    Exit codes: 0 if at least one command succeeded, or all forks were started; 24 if no command
    succeeded.

    Examples:

        vmckpt fork web1 --count 16

        vmckpt fork before-upgrade --on beta --name trial

        vmckpt fork web1 --count 8 --run './try-variant {}' --parallel 4
    """
    from vmckpt.app import controller
    from vmckpt.app.forks import RunRequest
    from vmckpt.snapshot.fork_rules import ForkRequest

    if run is None and (parallel is not None or keep is not Keep.BEST):
        raise BadInput("--parallel and --keep are only for --run", hint="add --run CMD")
    known = controller.load_inventory(inventory)
    request = ForkRequest(source=source, count=count, prefix=name, folder=folder)
    task = None
    if run is not None:
        task = RunRequest(command=run, parallel=parallel or os.cpu_count() or 1, keep=keep)
    started, result = asyncio.run(
        _create(known, store, request, task, on=on, key=identity_of(identity), quiet=json)
    )
    if json:
        done = None if result is None else result.as_json()
        output.print_json({**started.as_json(), "run": done})
    elif result is not None:
        _show_result(result)
    failed = [one for one in started.forks if one.error]
    if result is not None and result.best is None:
        raise HookFailed("the command succeeded for no fork", hint="see the output of the commands")
    if result is None and failed:
        raise HypervisorError(
            f"{len(failed)} of {show_count(len(started.forks), 'fork')} were not started:"
            f" {failed[0].error}",
            host=started.host, hint=f"run vmckpt doctor {started.host}",
        )  # fmt: skip


async def _create(
    inventory: "controller.Inventory", store: str | None, request: "ForkRequest",
    task: "RunRequest | None", *, on: str | None, key: "Identity | None", quiet: bool,
) -> "tuple[Started, RunResult | None]":  # fmt: skip
    from vmckpt.app import controller, forks

    stop = stop_on_signals("stopping: the forks will be dropped")
    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    started = await forks.start(acting, store, request, on=on, identity=key)
    if not quiet:
        _show_started(started)
    if task is None:
        return started, None
    return started, await forks.run(acting, started, task, _ignore if quiet else _show_ran)


def _ignore(_: "Ran") -> None:
    pass


def _show_started(started: "Started") -> None:
    for warning in started.warnings:
        output.say(f"warning: {warning}")
    table = output.table("fork", ">running after", ">memory")
    for one in started.forks:
        if one.error:
            output.say(f"warning: {one.name} was not started: {one.error}")
        else:
            table.add_row(one.name, show_seconds(one.took), show_bytes(started.memory))
    output.out.print(table)
    runs = show_count(len(started.running), "fork")
    output.out.print(
        f"{started.family}: {runs} of {started.template} on {started.host} after"
        f" {show_seconds(started.took)}, from {started.snapshot} in {started.store}"
    )
    late = [one for one in started.running if one.clock_not_set]
    if late:
        output.out.print(
            f"the clocks of {show_count(len(late), 'fork')} have the time of the snapshot until NTP"
            f" or an administrator sets them: {late[0].clock_not_set}"
        )


def _show_ran(ran: "Ran") -> None:
    from vmckpt.snapshot.guard import in_words

    score = "" if ran.score is None else f", {ran.score:g}"
    output.out.print(f"{ran.name}: {in_words(ran.status)} after {show_seconds(ran.took)}{score}")
    for text in (ran.output, ran.errors):
        for line in text.splitlines():
            output.out.print(f"    {output.in_one_line(line)}")


def _show_result(result: "RunResult") -> None:
    if result.best is not None:
        output.out.print(f"best: {result.best}")
    if result.dropped:
        output.out.print(f"{show_count(len(result.dropped), 'fork')} dropped")


@app.command()
def tree(inventory: INVENTORY = None, json: JSON = False) -> None:
    """Show the families on all hosts, and what each fork does not share.

    Memory and disk space are those that a fork does not share with its snapshot.

    Examples:

        vmckpt fork tree

        vmckpt fork tree --json
    """
    from vmckpt.app import controller, forks

    found = asyncio.run(forks.tree(controller.load_inventory(inventory)))
    if json:
        output.print_json(found.as_json())
    else:
        _show_tree(found)


def _show_tree(found: "ForkTree") -> None:
    for host, error in found.errors.items():
        output.say(f"warning: {host}: {error}; its families are not shown")
    if not found.families:
        output.say("no families")
        return
    table = output.table("family", "state", ">own memory", ">own disk space")
    for family in found.families:
        table.add_row(
            f"{family.template} {family.snapshot} ({family.store})", f"{family.id} on {family.host}"
        )
        for number, fork in enumerate(family.forks, start=1):
            branch = "└─" if number == len(family.forks) else "├─"
            table.add_row(
                f"{branch} {fork.name}", "running" if fork.runs else "off",
                show_bytes(fork.memory), show_bytes(fork.disk),
            )  # fmt: skip
    output.out.print(table)


@app.command()
def drop(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FORK]...", help="Names or UUIDs of forks.", autocompletion=arguments.guests
        ),
    ] = None,
    family: Annotated[
        str | None, typer.Option(metavar="ID", help="All forks of this family.")
    ] = None,
    yes: YES = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Destroy forks and remove their disks.

    A guest that is no fork of a family, or that was made independent with vmckpt fork keep, is
    refused. If the snapshot was taken by vmckpt fork, it is deleted together with the last fork.

    Examples:

        vmckpt fork drop web1-fork-2 web1-fork-3

        vmckpt fork drop --family fam-0a1b2c3d4e --yes
    """
    from vmckpt.app import controller, forks

    known = controller.load_inventory(inventory)
    plan = asyncio.run(forks.doomed(known, names or (), family))
    sure(f"destroy {', '.join(plan.names)}, with all their changes?", yes=yes)
    done = asyncio.run(_drop(known, plan))
    if json:
        output.print_json(done.as_json())
        return
    for name in done.forks:
        output.out.print(f"{name} was dropped")
    for id_ in done.snapshots:
        output.out.print(f"{id_} was deleted")


async def _drop(inventory: "controller.Inventory", plan: "Doomed") -> "Dropped":
    from vmckpt.app import controller, forks

    stop = stop_on_signals("dropping forks cannot be interrupted")
    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    return await forks.drop(controller.Controller(inventory=inventory, caller=caller), plan)


@app.command()
def keep(
    name: Annotated[
        str,
        typer.Argument(
            metavar="FORK", help="Name or UUID of the fork.", autocompletion=arguments.guests
        ),
    ],
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Make a fork independent of its family.

    All its memory and disks are copied while it is running, and its definition is stored. The guest
    then needs neither its family nor the snapshot. Its links stay as they are.

    Example:

        vmckpt fork keep web1-fork-3
    """
    from vmckpt.app import controller

    done = asyncio.run(_keep(controller.load_inventory(inventory), name))
    if json:
        output.print_json(done.as_json())
        return
    output.out.print(f"{done.fork.name} on {done.host} is independent of {done.family}")
    if done.unused is not None:
        output.say(
            f"no fork uses {done.unused} any more; to delete it, run vmckpt snapshot delete"
            f" {done.unused}"
        )


async def _keep(inventory: "controller.Inventory", name: str) -> "Kept":
    from vmckpt.app import controller, forks

    stop = stop_on_signals("stopping: the fork stays in its family")
    caller = controller.Caller(emit=Ticker().take, warn=output.say, stop=stop)
    return await forks.keep(controller.Controller(inventory=inventory, caller=caller), name)
