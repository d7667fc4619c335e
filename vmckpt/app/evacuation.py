"""Evacuate, repopulate and balance hosts: real hosts, or a fleet described by a file."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vmckpt import recovery as recovering
from vmckpt.app import permission
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
    """An evacuation, repopulation or rebalancing, from its plan to its report.

    Use as `async with`. The constructor raises InventoryError for an unknown host.
    """

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
        """Plan the task; see planner.plan and planner.balanced.

        Raises HypervisorError, InventoryError, JournalError, PolicyError.
        """
        if self._task.kind is Kind.BALANCE:
            return await planner.balanced(self._hosts, self._scope, self._task, self._caller)
        return await planner.plan(self._hosts, self._scope, self._task, self._caller)

    async def carry_out(self, plan: Plan, why: str, abort: asyncio.Event) -> Report:
        """Carry out the plan; see service.begin.

        `why`: the reason that is recorded for the maintenance of an evacuated host; setting `abort`
        cancels running moves. A host to be evacuated enters maintenance before the first move; a
        host to be repopulated leaves maintenance. Raises ReadOnly, NotPermitted; GuestLocked,
        Blocked or Cancelled if no move has begun; JournalError, PolicyError, InventoryError.
        """
        permission.require(self._inventory, str(plan.task.kind))
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
        except (GuestLocked, Blocked, Cancelled):  # no move has begun
            if new and not await asyncio.to_thread(_emptied, task.host):
                await asyncio.to_thread(maintenance.leave, task.host)
            elif was is not None:
                await asyncio.to_thread(maintenance.enter, task.host, was.why)
            raise


def _emptied(host: str) -> bool:
    """Return whether another controller is evacuating the host.

    The other controller may have started between this controller's check and its request for the
    lease, and may have found the host already in maintenance. Raises JournalError.
    """
    with jobs.open_journal() as journal:
        held = journal.holder(host_resource(host))
    return held is not None and held.kind == Kind.EVACUATE


async def put_in_order(controller: Controller) -> None:
    """Recover the jobs of dead controllers, before a plan is made.

    Raises ReadOnly, NotPermitted, JournalError.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    permission.require(inventory, "evacuate")
    await recovering.recover_before(inventory, policies, caller)


def back_to(host: str, policy: str | None) -> Task:
    """Return the task that moves evacuated guests back to a host.

    `policy`: name of a policy for all moves; None: each guest's own policy. Raises JournalError,
    and BadInput if no guest was moved away or the evacuation has not finished.
    """
    if (task := away_from(host, policy)) is not None:
        return task
    closed = host in maintenance.held()
    raise BadInput(
        f"no guest was moved away from {host} by vmckpt evacuate",
        hint=f"run vmckpt maintenance leave {host} to end its maintenance"
        if closed else f"move guests there with vmckpt migrate GUEST --to {host}",
    )  # fmt: skip


def away_from(host: str, policy: str | None) -> Task | None:
    """Return the task that moves guests back to a host, or None if no guest was moved away.

    `policy`: see `back_to`. Raises BadInput if the evacuation has not finished, and JournalError.
    """
    with jobs.open_journal() as journal:
        found = journal.on_host([str(Kind.EVACUATE)], host)
        closings = journal.on_host([MAINTENANCE], host)
    # The host enters maintenance shortly before the job begins, and may have left it since.
    last = max((one.began_at for one in found), default=0.0)
    since = max((one.began_at for one in closings if one.began_at <= last), default=0.0)
    guests, start, called = set[str](), set[str](), dict[str, str]()
    for one in found:
        if one.active:
            raise BadInput(
                f"{one.id} is still evacuating {host}",
                hint="wait until the job has ended, or run vmckpt recover",
            )
        if one.began_at < since:
            continue
        noted = service.noted(one.id, {str(left["guest"]) for left in _list(one.report, "left")})
        # Guests that were moved to make room, and guests whose standby was moved, do not count:
        # they were on other hosts before.
        guests |= {
            moved.uuid for moved in noted.moved if moved.source == host and not moved.standby
        }
        start |= noted.told  # a guest that is already running is not started
        called |= noted.called
    if not guests and not start:
        return None
    return Task(
        kind=Kind.REPOPULATE, host=host, goes=frozenset((one, host) for one in guests),
        called=frozenset(called.items()), start=frozenset(start), policy=policy,
    )  # fmt: skip


def was_emptied(host: str) -> bool:
    """Return whether a host has guests to be moved back, or is still being evacuated.

    Raises JournalError.
    """
    try:
        return away_from(host, None) is not None
    except BadInput:
        return True


def _list(told: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    found = (told or {}).get(key)
    return found if isinstance(found, list) else []


def maintained() -> Sequence[Held]:
    """Return the hosts in maintenance, sorted by name. Raises JournalError."""
    found = maintenance.held()
    return [found[name] for name in sorted(found)]


def enter(inventory: Inventory, host: str, why: str) -> tuple[Held, bool]:
    """Put a host into maintenance: no guest is placed on the host until it leaves maintenance.

    `host`: its name; `why`: the operator's reason, which is shown to others. Returns the record of
    the maintenance, and whether this call created it. Raises InventoryError, ReadOnly,
    NotPermitted, JournalError.
    """
    permission.require(inventory, "maintenance enter")
    return maintenance.enter(inventory.host(host).name, why)


def leave(inventory: Inventory, host: str) -> Held:
    """Take a host out of maintenance, so that guests may be placed on the host again.

    Returns the record of the ended maintenance. Raises ReadOnly, BadInput if the host is not in
    maintenance, and JournalError.
    """
    permission.require(inventory, "maintenance leave")
    return maintenance.leave(host)


LUCK = Luck(off=0.3, fails=0.02)
_PLAYS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """A plan for a fleet described by a file, and the outcome of simulating the plan."""

    plan: Plan
    plays: int
    """Number of simulations."""
    total: Range
    """The range of the simulated durations, in seconds."""
    arrived: int
    """The lowest number of guests that arrived in any simulation."""

    def as_json(self) -> dict[str, Any]:
        """Return the plan's JSON with `played` added; times are in milliseconds."""
        told = {
            "plays": self.plays, "arrived": self.arrived,
            "total_ms": [round(self.total.low * 1000, 1), round(self.total.high * 1000, 1)],
        }  # fmt: skip
        return self.plan.as_json() | {"played": told}


def emptied(path: Path, task: Task, folder: Path | None) -> Imagined:
    """Plan a task for a fleet described by a file, and simulate the plan.

    In the simulations, durations differ from the forecast and some moves fail. Raises BadInput,
    PolicyError.
    """
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
