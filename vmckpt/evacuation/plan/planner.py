"""Make a plan: query all hosts, place the guests, and run preflight on each move."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vmckpt.errors import HypervisorError, PolicyError, VmckptError
from vmckpt.evacuation import offline_move
from vmckpt.evacuation.plan import balance
from vmckpt.evacuation.plan import inventory as sights
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.gather import Hosts
from vmckpt.evacuation.plan.inventory import FleetView, Protected, TravelMethod
from vmckpt.evacuation.plan.placement import Assignment, Placement, Unplaced
from vmckpt.evacuation.plan.plan import Checked, Checks, Plan
from vmckpt.evacuation.state import EvacuationTerms
from vmckpt.evacuation.task import Kind, Task, terms
from vmckpt.inventory import Inventory
from vmckpt.journal import maintenance
from vmckpt.migration import service
from vmckpt.migration.forecast.forecast import Range
from vmckpt.migration.forecast.measure import Links
from vmckpt.migration.plan import preflight
from vmckpt.migration.plan.planner import Plan as MovePlan
from vmckpt.migration.request import MigrateRequest, Setting
from vmckpt.model.events import Caller, Decided
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import Decision
from vmckpt.policy import select
from vmckpt.policy.model import OnFailure, Policy
from vmckpt.policy.select import Subject
from vmckpt.protection import active, relocate_standby
from vmckpt.protection.relocate_standby import Relocation
from vmckpt.units import Seconds, show_count

DEFAULT = "maintenance"
"""The policy for evacuating hosts, which also applies to guests that no policy selects."""
_ROUNDS = 4
_AT_ONCE = 4
_TELL = Seconds(5.0)
"""Interval between progress reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The hosts and policies that a plan uses."""

    inventory: Inventory
    policies: tuple[Policy, ...]

    @property
    def hosts(self) -> tuple[Host, ...]:
        return tuple(self.inventory.hosts.values())

    def run(self, task: Task) -> Policy:
        """Return the policy of the run. Raises PolicyError."""
        return select.by_name(self.policies, task.policy or DEFAULT)

    def terms(self, task: Task) -> EvacuationTerms:
        """Return the terms of the run. Raises PolicyError."""
        return terms(self.run(task).evacuation, task.kind)

    def once(self) -> tuple[Policy, ...]:
        """Return the policies, limited to one attempt, since the evacuation itself retries."""
        return tuple(replace(one, on_failure=OnFailure.STOP) for one in self.policies)


def policy_of(scope: Scope, task: Task, host: Host, guest: Guest) -> Policy:
    """Return the policy for a guest's move. Raises PolicyError.

    This is the requested policy or, if none was requested, the guest's own policy. If only the
    default policy applies to the guest, the run's policy replaces the default policy.
    """
    subject = Subject(
        guest=guest.name, guest_labels=guest.labels, host_labels=host.labels, memory=guest.memory
    )
    chosen = select.choose(scope.policies, subject, task.policy)
    usual = chosen.policy.shipped and chosen.policy.name == select.DEFAULT
    return scope.run(task) if task.policy is None and usual else chosen.policy


async def gather_fleet(hosts: Hosts, scope: Scope, task: Task) -> FleetView:
    """Return the current state of all hosts. Raises PolicyError, JournalError, InventoryError."""
    run = scope.run(task).evacuation
    closed = await asyncio.to_thread(maintenance.held)
    protected = await asyncio.to_thread(_protected)
    away = task.kind is not Kind.EVACUATE or run.displace
    sources = [one.name for one in scope.hosts if away or one.name == task.host]
    answers = await hosts.look(
        sources,
        {name: one.closed for name, one in closed.items() if name != task.host},
        protected,
    )
    policies = {
        (one.host.name, guest.uuid): _policy(
            scope, task, one.host, guest, strict=one.host.name in sources
        )
        for one in answers.looks for guest in one.guests
    }  # fmt: skip
    emptied = task.host if task.kind is Kind.EVACUATE else None
    return sights.fleet_view(answers, policies, run, emptied)


def _policy(scope: Scope, task: Task, host: Host, guest: Guest, *, strict: bool) -> Policy:
    """Return the policy of a guest. If the choice fails and not `strict`, returns the run's policy,
    since the guest does not move."""
    try:
        return policy_of(scope, task, host, guest)
    except PolicyError:
        if strict:
            raise
        return scope.run(task)


def _protected() -> Mapping[str, Protected]:
    """Return the guests with an active protection, by UUID."""
    return {
        one.guest_uuid: Protected(primary=one.source, backup=one.target, job=one.id)
        for one in active.active() if one.guest_uuid and one.source and one.target
    }  # fmt: skip


async def plan(hosts: Hosts, scope: Scope, task: Task, caller: Caller) -> Plan:
    """Make a plan. Checks and forecasts each move, as `vmckpt migrate` does.

    Raises HypervisorError if the host itself does not answer, PolicyError, JournalError,
    InventoryError.
    """
    seen = await gather_fleet(hosts, scope, task)
    if task.host in seen.silent:
        raise HypervisorError(
            f"{task.host} does not answer: {seen.silent[task.host]}", host=task.host,
            hint=f"run vmckpt doctor {task.host}",
        )  # fmt: skip
    limits, looking = scope.terms(task), _Looking(hosts)
    asked, fleet = task.asked(seen), task.fleet(seen)
    found = plans.placed(fleet, asked, limits)
    for _ in range(_ROUNDS):
        fresh = [one for one in found.going if (one.tenant.name, one.target) not in looking.found]
        await looking.look(scope, seen, fresh, caller)
        crowded = plans.crowded(found.going, looking.found)
        looking.found.update(crowded)
        if not fresh and not crowded:
            break
        found = plans.placed(plans.without(fleet, looking.found), asked, limits)
    looking.found.update(plans.crowded(found.going, looking.found))
    looked = _looked_at(found, looking.found)
    left = (*plans.worded(looked.left, seen, looking.found), *task.unseen(seen))
    looked = replace(looked, left=left)
    return plans.made(task, seen, looked, looking.found, limits)


async def balanced(hosts: Hosts, scope: Scope, task: Task, caller: Caller) -> Plan:
    """Return a plan of moves that balance the hosts' loads and are worth their cost.

    Arguments and errors: see `plan`.
    """
    limits, checks = scope.terms(task), plans.NO_CHECKS
    for number in range(_ROUNDS):
        seen = await gather_fleet(hosts, scope, task)
        found = balance.propose(plans.without(task.fleet(seen), checks), limits.rules)
        goes = frozenset((seen.known[one.tenant.name].guest.uuid, one.target) for one in found)
        made = await plan(hosts, scope, replace(task, goes=goes), caller)
        if not made.left or number == _ROUNDS - 1:
            return made
        checks = {**checks, **made.checks}  # other targets or other guests may fit
    raise AssertionError("unreachable: the last round always returns a plan")


def _looked_at(found: Placement, checks: Checks) -> Placement:
    """Return the placement without moves that preflight forbids or has not checked."""
    going, left = [], list(found.left)
    for one in found.going:
        check = checks.get((one.tenant.name, one.target))
        if check is not None and not check.blockers:
            going.append(one)
            continue
        why = "preflight has not checked this move" if check is None else check.blockers[0].text
        hint = None if check is None else check.blockers[0].hint
        hint = hint or f"run vmckpt plan {one.tenant.name} --to {one.target}"
        left.append(Unplaced(tenant=one.tenant, why=f"{one.target}: {why}", hint=hint))
    return Placement(tuple(going), tuple(left))


class _Looking:
    """The results of preflight and forecasts so far."""

    def __init__(self, hosts: Hosts) -> None:
        self.found: dict[tuple[str, str], Checked] = {}
        self._hosts, self._links = hosts, Links()
        self._narrow = asyncio.Semaphore(_AT_ONCE)

    async def look(
        self, scope: Scope, seen: FleetView, going: Sequence[Assignment], caller: Caller
    ) -> None:
        """Check moves, several at a time."""

        done, told = 0, asyncio.get_running_loop().time()

        async def one(move: Assignment) -> None:
            nonlocal done, told
            known = seen.known[move.tenant.name]
            async with self._narrow:
                self.found[move.tenant.name, move.target] = await self._checked(
                    scope, known, move.target, caller
                )
            done += 1
            if (now := asyncio.get_running_loop().time()) - told > _TELL:
                told = now
                caller.emit(_looked(f"{done} of {show_count(len(going), 'move')}", now))

        await asyncio.gather(*(one(move) for move in going))

    async def _checked(
        self, scope: Scope, known: sights.Known, target: str, caller: Caller
    ) -> Checked:
        """Check one move. Live migrations and copies of images are also forecast."""
        hosts = scope.inventory
        if known.way is TravelMethod.ANEW:
            return await _standing(scope, known, target, caller)
        if known.way is TravelMethod.OFFLINE:
            async with self._hosts.logins(known.host, target) as remotes:
                ends = offline_move.Ends(
                    source=hosts.host(known.host), target=hosts.host(target), remotes=remotes
                )
                return await offline_move.check_move(known, ends, self._links)
        if known.way is not TravelMethod.LIVE:
            return Checked(policy=known.policy.name, mode=str(known.way))
        setting = Setting(
            source=hosts.host(known.host), target=hosts.host(target), policies=scope.once(),
            outside=None,
        )  # fmt: skip
        # Repopulate ends the host's maintenance before the first move.
        request = MigrateRequest(
            guest=known.guest.uuid, to=target, policy=known.policy.name, closed_too=True
        )
        silent = Caller(emit=lambda _: None, warn=caller.warn, stop=caller.stop)
        try:
            async with self._hosts.logins(known.host, target) as open_:
                made = await service.plan(setting, request, silent, open_=open_, links=self._links)
        except HypervisorError as exc:
            return _refused(known, target, exc)
        return _checked(made, known.policy.name)


def another(scope: Scope, known: sights.Known, target: str) -> Relocation:
    """Return the relocation of a standby.

    Raises BadInput if its guest is not protected, and JournalError.
    """
    hosts = scope.inventory
    return Relocation(
        known=active.of(hosts, known.guest.uuid), backup=hosts.host(target),
        lease=hosts.lease, usual=known.policy.protection, memory=known.guest.memory,
    )  # fmt: skip


async def _standing(scope: Scope, known: sights.Known, target: str, caller: Caller) -> Checked:
    """Check whether a standby may be relocated to `target`."""
    try:
        found = await relocate_standby.require_relocatable(
            await asyncio.to_thread(another, scope, known, target), caller
        )
    except VmckptError as exc:
        return _refused(known, target, exc)
    memory, findings = known.guest.memory, found.findings
    return Checked(
        policy=known.policy.name, mode=str(known.way), blockers=preflight.blockers(findings),
        warnings=tuple(one for one in findings if one.severity is Severity.WARNING),
        sent=Range(memory, memory + found.disks_bytes), rooms=found.rooms,
    )  # fmt: skip


def _refused(known: sights.Known, target: str, error: VmckptError) -> Checked:
    refused = Finding(
        code="error", severity=Severity.BLOCKER, where=target, text=error.message, hint=error.hint
    )
    return Checked(policy=known.policy.name, mode="", blockers=(refused,))


def _looked(text: str, now: float) -> Decided:
    return Decided(decision=Decision(at=Seconds(now), action="checked", reason=text))


def _checked(made: MovePlan, policy: str) -> Checked:
    found = [one for one in made.findings if one.code != preflight.IN_MAINTENANCE]
    forecast = None if made.outlook is None else made.outlook.of(made.mode)
    link = None if made.outlook is None else made.outlook.facts.link
    return Checked(
        policy=policy, mode=str(made.mode), blockers=preflight.blockers(tuple(found)),
        warnings=tuple(one for one in found if one.severity is Severity.WARNING),
        total=None if forecast is None else forecast.total,
        downtime=None if forecast is None else forecast.downtime,
        sent=None if forecast is None else forecast.sent,
        bandwidth=None if made.outlook is None else made.outlook.facts.bandwidth,
        link=None if link is None else link.rate,
        rooms=made.copies.rooms, known=forecast is None or forecast.known,
    )  # fmt: skip
