"""Emptying a host whose controller is gone: the next one goes on with it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vmckpt.errors import PolicyError
from vmckpt.evacuate import command
from vmckpt.evacuate.engine import PAUSED, STOPPING
from vmckpt.evacuate.gather import Hosts
from vmckpt.evacuate.scouting import Scope
from vmckpt.evacuate.site import Orders, Resolve
from vmckpt.evacuate.task import Task
from vmckpt.journal.recorder import Unattended
from vmckpt.journal.records import Operation
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy import parse
from vmckpt.policy.model import Policy


def in_force(operation: Operation, policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """These, and the policy that was asked for as it was then."""
    name = operation.policy or "policy"
    try:
        asked = parse.parse(operation.detail[command.POLICY] or "", Path(name))
    except (KeyError, PolicyError):
        return tuple(policies)
    return (asked, *(one for one in policies if one.name != asked.name))


async def settle(case: Unattended, policies: Sequence[Policy], resolve: Resolve) -> Settled:
    """See recover.rooms.Room. Guests on their way have jobs of their own, and are left to those."""
    operation = case.operation
    try:
        task = Task.from_json(operation.detail["task"])
    except (KeyError, ValueError, TypeError):
        return case.ended(Settled(truth="it had not begun", outcome=Outcome.FAILED))
    doing = f"{operation.kind} of {task.host}"
    if case.recorder is None or not case.adopt:
        return Settled(
            truth=f"{doing} is unfinished", outcome=None, goes_on=True,
            settle="vmckpt recover goes on with it",
        )  # fmt: skip
    scope = Scope(inventory=case.inventory, policies=in_force(operation, policies))
    caller = case.caller
    if operation.phase in (PAUSED, STOPPING):
        # Somebody had said that nothing new is to begin.
        caller = replace(caller, stop=asyncio.Event())
        caller.stop.set()
    orders = Orders(scope=scope, task=task, caller=caller, abort=case.caller.stop, resolve=resolve)
    async with Hosts(scope.hosts) as hosts:
        told = await command.carry_out(orders, hosts, None, case.recorder)
    left = [f"{one.tenant.name}: {one.why}" for one in told.ended.left]
    bare = [f"{one.guest} has no standby any more: {one.mend}" for one in told.bare]
    how = "was ended" if told.ended.stopped else "was gone on with"
    if operation.phase in (PAUSED, STOPPING):
        how = f"was {operation.phase} when its controller ended, and is ended"
    return Settled(
        truth=f"{doing} {how}: {len(told.arrived)} moved in all, {len(left)} left"
        + (f", {len(bare)} without a standby" if bare else ""),
        outcome=told.outcome, did=tuple(f"moved {one.guest} to {one.target}"
                                        for one in told.ended.arrived),
        warnings=(*left, *bare),
    )  # fmt: skip
