"""Maintain hosts one after the other: empty each, run a command there, check it, fill it again."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.app import evacuation
from vmckpt.app import hosts as app_hosts
from vmckpt.app.controller import Controller
from vmckpt.app.evacuation import Emptying
from vmckpt.errors import BadInput, Blocked, Cancelled, GuestsRemaining, HookFailed, RemoteError
from vmckpt.evacuation.plan.plan import Plan
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity, maintenance
from vmckpt.model.finding import Severity
from vmckpt.model.host import Host
from vmckpt.remote.ssh import Remote, last_line
from vmckpt.units import Seconds, show_seconds

_AGAIN = Seconds(5.0)
_WHATEVER = 'eval "$1"'
"""What the operator wrote is for a shell, all of it."""
_BROKEN = -1
"""What ssh says of a command whose connection broke."""
_STOPPING = "stopping"
_START = """\
cat /proc/sys/kernel/random/boot_id
sed 's/.*) //' /proc/1/stat | cut -d' ' -f20
[ "$(systemctl is-system-running 2>/dev/null)" != stopping ] &&
    [ ! -e /run/systemd/shutdown/scheduled ] || echo stopping
"""
"""Says which start of the host this is: its kernel's, and its first process's in a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingOptions:
    """What is done to each host."""

    command: str
    """By a shell of the host, once it is empty; it may reboot it."""
    before: str | None
    """The same before its first guest leaves; it must not reboot it."""
    after: str | None
    """The same once its guests are back."""
    policy: str | None
    limit: Seconds
    """How long the command may take."""
    healthy_in: Seconds
    """How long the host may take to be well again after that."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """What became of one host."""

    host: str
    emptied: Report
    filled: Report | None
    """None: nobody had to be brought back."""

    def as_json(self) -> dict[str, Any]:
        return {
            "host": self.host, "emptied": self.emptied.as_json(),
            "filled": None if self.filled is None else self.filled.as_json(),
        }  # fmt: skip


Show = Callable[[Plan], None]


async def roll(
    controller: Controller, hosts: Sequence[str], options: RollingOptions,
    *, show: Show, abort: asyncio.Event,
) -> list[Rolled]:  # fmt: skip
    """One host after the other; the first that goes wrong is the last, and stays in maintenance.

    Raises Blocked, GuestsRemaining, HookFailed, RemoteError, Cancelled.
    """
    inventory, caller = controller.inventory, controller.caller
    inventory.may_act()
    chosen = [inventory.host(name) for name in hosts]
    without = [one.name for one in chosen if one.ssh is None]
    if without:
        raise BadInput(
            f"{', '.join(without)}: no ssh address, so no command can be run there",
            hint="add ssh: {address: ...} to the inventory",
        )
    done = []
    await asyncio.to_thread(_free, hosts, options.why)
    for host in chosen:
        if caller.stop.is_set():
            raise Cancelled(f"stopped before {host.name}; it and what follows are untouched")
        await asyncio.to_thread(_free, [host.name], options.why)
        done.append(await _one(controller, host, options, show=show, abort=abort))
    return done


def _free(hosts: Sequence[str], why: str) -> None:
    """Who closed a host for a reason of his own does not want guests back there. Raises Blocked."""
    held = maintenance.held()
    for name in hosts:
        one = held.get(name)
        if one is not None and (one.asked_by, one.why) != (controller_identity.asked_by(), why):
            # Who ends it by hand gives up who was moved away: they come back by repopulate alone.
            ends = "repopulate" if evacuation.was_emptied(name) else "maintenance leave"
            raise Blocked(
                f"{name}: {one.closed}; it is untouched",
                hint=f"leave it out, or end that with vmckpt {ends} {name}",
            )


async def _one(
    controller: Controller, host: Host, options: RollingOptions,
    *, show: Show, abort: asyncio.Event,
) -> Rolled:  # fmt: skip
    inventory, caller = controller.inventory, controller.caller

    async def through(task: Task, before: str | None = None) -> Report:
        async with Emptying(controller, task) as emptying:
            plan = await emptying.plan()
            show(plan)
            if plan.left:
                first = plan.left[0]
                raise Blocked(
                    f"{host.name}: {first.tenant.name} has no place to go to: {first.why}",
                    hint=first.hint,
                )
            if before is not None:
                if caller.stop.is_set():
                    raise Cancelled(f"stopped; {host.name} is untouched")
                caller.warn(f"{host.name}: running: {before}")
                await _run(host, "--before", before, options.limit, "nothing was moved")
            done = await emptying.carry_out(plan, options.why, abort)
            _complete(host, done)
            return done

    emptied = await through(
        Task(kind=Kind.EVACUATE, host=host.name, policy=options.policy), options.before
    )
    if caller.stop.is_set():
        raise Cancelled(f"stopped; {host.name} is empty, in maintenance, and nothing was run there")
    caller.warn(f"{host.name}: empty; running: {options.command}")
    empty = f"it is empty and in maintenance; mend it, then vmckpt repopulate {host.name}"
    left = await _run(host, "the command", options.command, options.limit, empty, may_go=True)
    caller.warn(f"{host.name}: waiting until it is well")
    await _well(inventory, host, options.healthy_in, caller.stop, left=left)
    back = evacuation.away_from(host.name, options.policy)
    if back is None:  # nobody was there
        evacuation.leave(inventory, host.name)
        filled = None
    else:
        filled = await through(back)
    if options.after is not None:
        if caller.stop.is_set():
            raise Cancelled(f"stopped; {host.name} has its guests back, and --after was not run")
        caller.warn(f"{host.name}: running: {options.after}")
        back_again = "it takes guests again, and has its own back"
        await _run(host, "--after", options.after, options.limit, back_again)
    return Rolled(host=host.name, emptied=emptied, filled=filled)


def _complete(host: Host, done: Report) -> None:
    """Raises GuestsRemaining if not all is well: the next host may be where that matters."""
    if done.ended.left:
        first = done.ended.left[0]
        raise GuestsRemaining(
            f"{host.name}: {first.tenant.name} is left: {first.why}", hint=first.hint
        )
    if done.bare:
        lost = done.bare[0]
        raise GuestsRemaining(f"{host.name}: {lost.guest} has no standby any more", hint=lost.hint)


async def _run(
    host: Host, name: str, command: str, limit: Seconds, stands: str, *, may_go: bool = False
) -> str | None:
    """One that says no stops everything. `stands`: how the host is then.

    With `may_go` a command whose connection breaks may have rebooted the host: which start of it
    that was is returned, None if the command ended. Raises HookFailed; RemoteError if there is no
    connection to begin with.
    """
    loop = asyncio.get_running_loop()
    async with Remote(host) as remote:
        start, _ = await _started(remote)  # that there is no connection is another matter
        began = loop.time()
        try:
            answer = await remote.run(["sh", "-c", _WHATEVER, "sh", command], limit=limit)
        except RemoteError as exc:
            if may_go and loop.time() - began < limit:
                return start
            raise HookFailed(f"{host.name}: {name}: {exc.message}", hint=stands) from exc
    if may_go and answer.status == _BROKEN:
        return start
    if answer.status != 0:
        raise HookFailed(
            f"{host.name}: {name} ended with {answer.status}:"
            f" {last_line(answer.err or answer.out, 'it said nothing')}",
            hint=stands,
        )
    return None


async def _started(remote: Remote) -> tuple[str, bool]:
    """Which start of a host this is, and whether it is about to go down. Raises RemoteError."""
    told = (await remote.run(["sh", "-s"], text=_START)).out.split()
    return " ".join(told[:2]), _STOPPING in told[2:]


async def _unwell(inventory: Inventory, host: Host, left: str | None) -> str | None:
    """What is wrong with a host; `left`: as of `_run`. None: nothing."""
    try:
        async with Remote(host) as remote:
            start, stopping = await _started(remote)
    except RemoteError as exc:
        return exc.message
    if stopping:
        return "it is about to go down"
    if left == start:
        return (
            "the connection to the command broke and the host has not been restarted since: the"
            " command may still be at work there"
        )
    found = await app_hosts.doctor(inventory, [host.name])
    return next((one.text for one in found if one.severity is Severity.BLOCKER), None)


async def _well(
    inventory: Inventory, host: Host, limit: Seconds, stop: asyncio.Event, *, left: str | None
) -> None:
    """Wait until nothing is wrong with it, twice: one that is about to go down still answers."""
    loop = asyncio.get_running_loop()
    until, good = loop.time() + limit, 0
    while True:
        why = await _unwell(inventory, host, left)
        good = good + 1 if why is None else 0
        if good >= 2:
            return
        if stop.is_set():
            raise Cancelled(f"{host.name} is empty and in maintenance; vmckpt repopulate fills it")
        if loop.time() > until:
            raise HookFailed(
                f"{host.name} is not well after {show_seconds(limit)}: {why or 'it just was not'}",
                hint=f"run vmckpt doctor {host.name}; it is empty and in maintenance",
            )
        await asyncio.sleep(_AGAIN)
