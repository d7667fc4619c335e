"""Maintain hosts in turn: evacuate each host, run a command, check the host, repopulate it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vmckpt.app import evacuation, permission
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
from vmckpt.model.host import ADD_SSH, Host
from vmckpt.remote.ssh import Remote, last_line
from vmckpt.units import Seconds, show_seconds

_AGAIN = Seconds(5.0)
_WHATEVER = 'eval "$1"'
"""Makes a shell interpret the operator's complete command."""
_BROKEN = -1
"""The exit status that ssh reports if the connection was lost."""
_STOPPING = "stopping"
_START = """\
cat /proc/sys/kernel/random/boot_id
sed 's/.*) //' /proc/1/stat | cut -d' ' -f20
[ "$(systemctl is-system-running 2>/dev/null)" != stopping ] &&
    [ ! -e /run/systemd/shutdown/scheduled ] || echo stopping
"""
"""Prints an identifier of the host's current boot, and whether the host is shutting down.

A boot is identified by the kernel's boot ID and, for a container, by the start time of its first
process.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollingOptions:
    """The commands and time limits that apply to each host."""

    command: str
    """Shell command to run on the empty host; it may reboot the host."""
    before: str | None
    """Shell command, if any, to run before the first guest leaves; must not reboot the host."""
    after: str | None
    """Shell command to run on the host after the guests are back, if any."""
    policy: str | None
    limit: Seconds
    """Time limit for each command, in seconds."""
    healthy_in: Seconds
    """Time limit for the host to be healthy again after the command, in seconds."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """The result of one host's maintenance."""

    host: str
    emptied: Report
    filled: Report | None
    """The report of the repopulation; None if no guest had to be moved back or started again."""

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
    """Maintain hosts one after the other; the first failure ends the run.

    A host stays in maintenance if the command fails, or the host is not healthy afterwards. `show`
    is called with each plan; `abort` cancels migrations in progress. Returns a result for each
    host. Raises ReadOnly, BadInput, Blocked, GuestsRemaining, HookFailed, RemoteError, Cancelled,
    and the errors of Emptying.plan and Emptying.carry_out.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "roll")
    chosen = [inventory.host(name) for name in hosts]
    without = [one.name for one in chosen if one.ssh is None]
    if without:
        raise BadInput(
            f"{', '.join(without)}: no ssh address, so no command can be run there",
            hint=ADD_SSH,
        )
    done = []
    await asyncio.to_thread(_free, hosts, options.why)
    for host in chosen:
        if caller.stop.is_set():
            raise Cancelled(f"stopped before {host.name}; this host and later hosts are unchanged")
        await asyncio.to_thread(_free, [host.name], options.why)
        done.append(await _one(controller, host, options, show=show, abort=abort))
    return done


def _free(hosts: Sequence[str], why: str) -> None:
    """Check that no host is in maintenance for another reason or operator. Raises Blocked.

    Guests must not be moved back to a host that is in maintenance for another reason.
    """
    held = maintenance.held()
    for name in hosts:
        one = held.get(name)
        if one is not None and (one.asked_by, one.why) != (controller_identity.asked_by(), why):
            # With maintenance leave, evacuated guests are abandoned; only repopulate moves them
            # back.
            ends = "repopulate" if evacuation.was_emptied(name) else "maintenance leave"
            raise Blocked(
                f"{name}: {one.closed}; the host was not changed",
                hint=f"omit the host, or run vmckpt {ends} {name} first",
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
                    f"{host.name}: {first.tenant.name} cannot be moved: {first.why}",
                    hint=first.hint,
                )
            if before is not None:
                if caller.stop.is_set():
                    raise Cancelled(f"stopped; {host.name} is unchanged")
                caller.warn(f"{host.name}: running: {before}")
                await _run(host, "--before", before, options.limit, "no guest was moved")
            done = await emptying.carry_out(plan, options.why, abort)
            _complete(host, done)
            return done

    emptied = await through(
        Task(kind=Kind.EVACUATE, host=host.name, policy=options.policy), options.before
    )
    if caller.stop.is_set():
        raise Cancelled(
            f"stopped; {host.name} is empty and in maintenance, and the command was not run"
        )
    caller.warn(f"{host.name}: empty; running: {options.command}")
    empty = (
        "the host is empty and in maintenance; fix the problem, then run vmckpt repopulate"
        f" {host.name}"
    )
    left = await _run(host, "the command", options.command, options.limit, empty, may_go=True)
    caller.warn(f"{host.name}: waiting until the host is healthy")
    await _well(inventory, host, options.healthy_in, caller.stop, left=left)
    back = evacuation.away_from(host.name, options.policy)
    if back is None:  # the host had no guests
        evacuation.leave(inventory, host.name)
        filled = None
    else:
        filled = await through(back)
    if options.after is not None:
        if caller.stop.is_set():
            raise Cancelled(
                f"stopped; {host.name} accepts guests again, but the --after command was not run"
            )
        caller.warn(f"{host.name}: running: {options.after}")
        back_again = "the host accepts guests again, and its own guests are back"
        await _run(host, "--after", options.after, options.limit, back_again)
    return Rolled(host=host.name, emptied=emptied, filled=filled)


def _complete(host: Host, done: Report) -> None:
    """Check that every guest was moved and kept its standby. Raises GuestsRemaining.

    An affected guest may depend on the next host, so the run must not continue.
    """
    if done.ended.left:
        first = done.ended.left[0]
        raise GuestsRemaining(
            f"{host.name}: {first.tenant.name} needs attention: {first.why}", hint=first.hint
        )
    if done.bare:
        lost = done.bare[0]
        raise GuestsRemaining(f"{host.name}: {lost.guest} has lost its standby", hint=lost.hint)


async def _run(
    host: Host, name: str, command: str, limit: Seconds, stands: str, *, may_go: bool = False
) -> str | None:
    """Run a command on the host. `stands`: the state of the host after a failure, for the hint.

    With `may_go`, a lost connection is not a failure, because the command may have rebooted the
    host. Returns the boot during which the connection was lost, or None if the command exited.
    Raises HookFailed if the command fails, RemoteError if the host cannot be reached at the start.
    """
    loop = asyncio.get_running_loop()
    async with Remote(host) as remote:
        start, _ = await _started(remote)  # raises RemoteError if the host cannot be reached
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
            f"{host.name}: {name} exited with status {answer.status}:"
            f" {last_line(answer.err or answer.out, 'no output')}",
            hint=stands,
        )
    return None


async def _started(remote: Remote) -> tuple[str, bool]:
    """Return a host's current boot, and whether the host is shutting down. Raises RemoteError."""
    told = (await remote.run(["sh", "-s"], text=_START)).out.split()
    return " ".join(told[:2]), _STOPPING in told[2:]


async def _unwell(inventory: Inventory, host: Host, left: str | None) -> str | None:
    """Return what is wrong with a host, or None. `left`: the result of `_run`."""
    try:
        async with Remote(host) as remote:
            start, stopping = await _started(remote)
    except RemoteError as exc:
        return exc.message
    if stopping:
        return "the host is shutting down"
    if left == start:
        return (
            "the connection was lost while the command was running, and the host has not restarted"
            " since; the command may still be running"
        )
    found = await app_hosts.doctor(inventory, [host.name])
    return next((one.text for one in found if one.severity is Severity.BLOCKER), None)


async def _well(
    inventory: Inventory, host: Host, limit: Seconds, stop: asyncio.Event, *, left: str | None
) -> None:
    """Wait until two consecutive checks find the host healthy. `limit`: in seconds.

    A single check is not sufficient, because a host that is about to shut down still answers.
    Raises Cancelled, and HookFailed after the time limit.
    """
    loop = asyncio.get_running_loop()
    until, good = loop.time() + limit, 0
    while True:
        why = await _unwell(inventory, host, left)
        good = good + 1 if why is None else 0
        if good >= 2:
            return
        if stop.is_set():
            raise Cancelled(
                f"stopped; {host.name} is empty and in maintenance; to move its guests back, run"
                f" vmckpt repopulate {host.name}"
            )
        if loop.time() > until:
            raise HookFailed(
                f"{host.name} is not healthy after {show_seconds(limit)}:"
                f" {why or 'the last check passed, but two in a row must pass'}",
                hint=f"the host is empty and in maintenance; run vmckpt doctor {host.name}",
            )
        await asyncio.sleep(_AGAIN)
