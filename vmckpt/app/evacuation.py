"""Evacuate hosts and bring guests back, on real hosts or on those that a file describes."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vmckpt import recovery as recovering
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, Blocked, Cancelled, GuestLocked
from vmckpt.evacuation import service
from vmckpt.evacuation.host_actions import Orders
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan import planner
from vmckpt.evacuation.plan.gather import Hosts
from vmckpt.evacuation.plan.inventory import FleetView
from vmckpt.evacuation.plan.plan import Plan
from vmckpt.evacuation.plan.planner import Scope
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import FLEET, Kind, Task, terms
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, maintenance
from vmckpt.journal.maintenance import Held
from vmckpt.journal.records import MAINTENANCE
from vmckpt.lease.controller_lease import host_resource
from vmckpt.migration.forecast.forecast import Range
from vmckpt.model.events import Caller
from vmckpt.model.migration import Outcome
from vmckpt.policy import loader
from vmckpt.simulation import fleet_file
from vmckpt.simulation.evacuation import Luck, Sim
from vmckpt.util.config_file import likely


class Emptying:
    """One order, from the plan to its end. Use as `async with`."""

    def __init__(self, controller: Controller, task: Task) -> None:
        inventory, policies, caller = controller.inventory, controller.policies, controller.caller
        if task.host != FLEET:
            inventory.host(task.host)
        for name in task.to or ():
            inventory.host(name)
        self._inventory, self._policies = inventory, policies
        self._scope = Scope(inventory=inventory, policies=tuple(policies))
        self._hosts = Hosts(self._scope.hosts)
        self._task, self._caller = task, caller

    async def __aenter__(self) -> "Emptying":
        await self._hosts.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._hosts.__aexit__(None, None, None)

    async def plan(self) -> Plan:
        """What would be done; see planner.plan and planner.balanced."""
        if self._task.kind is Kind.BALANCE:
            return await planner.balanced(self._hosts, self._scope, self._task, self._caller)
        return await planner.plan(self._hosts, self._scope, self._task, self._caller)

    async def carry_out(self, plan: Plan, why: str, abort: asyncio.Event) -> Report:
        """Do what the plan's task says; see service.begin.

        A host to be emptied is in maintenance from before the first move on; one to be filled again
        is taken out of that.
        """
        self._inventory.may_act()
        task, new = plan.task, False
        was = (await asyncio.to_thread(maintenance.held)).get(task.host)
        if task.kind is Kind.EVACUATE:
            _, new = await asyncio.to_thread(maintenance.enter, task.host, why)
        elif was is not None:
            await asyncio.to_thread(maintenance.leave, task.host)
        deaf = Caller(emit=lambda _: None, warn=self._caller.warn, stop=asyncio.Event())

        async def resolve(job: str) -> Outcome | None:
            found = await recovering.recover_job(self._inventory, self._policies, deaf, job)
            return found.outcome

        orders = Orders(
            scope=self._scope, task=task, caller=self._caller, abort=abort, resolve=resolve
        )
        try:
            return await service.begin(orders, self._hosts, plan)
        except (GuestLocked, Blocked, Cancelled):  # nothing was begun
            if new and not await asyncio.to_thread(_emptied, task.host):
                await asyncio.to_thread(maintenance.leave, task.host)
            elif was is not None:
                await asyncio.to_thread(maintenance.enter, task.host, was.why)
            raise


def _emptied(host: str) -> bool:
    """Whether another controller empties it: it began between our look and our lease, and found the
    host in maintenance."""
    with jobs.open_journal() as journal:
        held = journal.holder(host_resource(host))
    return held is not None and held.kind == Kind.EVACUATE


async def put_in_order(controller: Controller) -> None:
    """What dead controllers left, before anything is planned."""
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    inventory.may_act()
    await recovering.recover_before(inventory, policies, caller)


def back_to(host: str, policy: str | None) -> Task:
    """The order to bring back all that was moved away from a host since it was emptied.

    Raises BadInput if nothing was, or if that is not finished.
    """
    if (task := away_from(host, policy)) is not None:
        return task
    closed = host in maintenance.held()
    raise BadInput(
        f"no guest was moved away from {host} by vmckpt evacuate",
        hint=f"vmckpt maintenance leave {host} ends its maintenance"
        if closed else f"move guests there with vmckpt migrate GUEST --to {host}",
    )  # fmt: skip


def away_from(host: str, policy: str | None) -> Task | None:
    """The same; None if nothing was. Raises BadInput if that is not finished."""
    with jobs.open_journal() as journal:
        found = journal.on_host([str(Kind.EVACUATE)], host)
        closings = journal.on_host([MAINTENANCE], host)
    # A maintenance is entered a moment before the job begins, and may have been left since.
    last = max((one.began_at for one in found), default=0.0)
    since = max((one.began_at for one in closings if one.began_at <= last), default=0.0)
    guests, start, called = set[str](), set[str](), dict[str, str]()
    for one in found:
        if one.active:
            raise BadInput(
                f"{one.id} is still emptying {host}", hint="wait for it, or run vmckpt recover"
            )
        if one.began_at < since:
            continue
        noted = service.noted(one.id, {str(left["guest"]) for left in _list(one.report, "left")})
        # Not who only made room, nor whose standby went: the guest was elsewhere all the time.
        guests |= {
            moved.uuid for moved in noted.moved if moved.source == host and not moved.standby
        }
        start |= noted.told  # one that runs is not started
        called |= noted.called
    if not guests and not start:
        return None
    return Task(
        kind=Kind.REPOPULATE, host=host, goes=frozenset((one, host) for one in guests),
        called=frozenset(called.items()), start=frozenset(start), policy=policy,
    )  # fmt: skip


def was_emptied(host: str) -> bool:
    """Whether somebody is to come back to it, or is being moved away. Raises JournalError."""
    try:
        return away_from(host, None) is not None
    except BadInput:
        return True


def _list(told: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    found = (told or {}).get(key)
    return found if isinstance(found, list) else []


def maintained() -> Sequence[Held]:
    """Hosts in maintenance, by name."""
    found = maintenance.held()
    return [found[name] for name in sorted(found)]


def enter(inventory: Inventory, host: str, why: str) -> tuple[Held, bool]:
    """Nothing new is placed on a host from now on; whether that is new. Raises BadInput."""
    inventory.may_act()
    return maintenance.enter(inventory.host(host).name, why)


def leave(inventory: Inventory, host: str) -> Held:
    """It may take guests again. Raises BadInput if it is in no maintenance."""
    inventory.may_act()
    return maintenance.leave(host)


LUCK = Luck(off=0.3, fails=0.02)
_PLAYS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """A plan for a fleet of a file, and how it went when it was played."""

    plan: Plan
    plays: int
    total: Range
    """Seconds, of the plays."""
    arrived: int
    """Guests that did in every play."""

    def as_json(self) -> dict[str, Any]:
        """As a plan, and `played`; times in milliseconds."""
        told = {
            "plays": self.plays, "arrived": self.arrived,
            "total_ms": [round(self.total.low * 1000, 1), round(self.total.high * 1000, 1)],
        }  # fmt: skip
        return self.plan.as_json() | {"played": told}


def emptied(path: Path, task: Task, folder: Path | None) -> Imagined:
    """How a host of a fleet that a file describes would be emptied, and how that would go where
    durations are off and some moves fail. Raises BadInput, PolicyError."""
    run = loader.load_one(task.policy or planner.DEFAULT, loader.folder(folder, None)).evacuation
    limits = terms(run, task.kind)
    found = fleet_file.load(path, run.cpu_overcommit)
    names = {one.name for one in found.places}
    for host in (task.host, *(task.to or ())):
        if host not in names:
            raise BadInput(f"{path}: no host {host!r}{likely(host, names)}")
    seen = FleetView(fleet=found, known=MappingProxyType({}), silent=MappingProxyType({}))
    there, asked = task.fleet(seen), task.asked(seen)
    plan = plans.made(task, seen, plans.placed(there, asked, limits), plans.NO_CHECKS, limits)
    able = frozenset(one.tenant.name for one in plan.going)
    plays = [Sim(there, able, limits, luck=LUCK, seed=seed) for seed in range(_PLAYS)]
    for one in plays:
        one.run()
    arrived = [len(able & {move.name for move in one.moved}) for one in plays]
    return Imagined(
        plan=plan, plays=len(plays), arrived=min(arrived),
        total=Range(min(one.now for one in plays), max(one.now for one in plays)),
    )  # fmt: skip
