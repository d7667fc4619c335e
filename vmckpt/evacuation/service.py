"""Evacuate a host, or bring its guests back: plan, run, report, and resume after a crash."""

import asyncio
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from vmckpt.errors import Blocked, Cancelled, GuestLocked, PolicyError
from vmckpt.evacuation import report as reports
from vmckpt.evacuation.engine import PAUSED, STOPPING, Run
from vmckpt.evacuation.host_actions import Orders, Resolve, Site
from vmckpt.evacuation.interfaces import Arrived
from vmckpt.evacuation.plan.gather import Hosts
from vmckpt.evacuation.plan.plan import NO_CHECKS, Plan
from vmckpt.evacuation.plan.planner import Scope
from vmckpt.evacuation.report import Bare, Report
from vmckpt.evacuation.task import Task
from vmckpt.journal import jobs
from vmckpt.journal import recorder as journal
from vmckpt.journal.evacuation_progress import MOVE, SHUT_DOWN, STANDBY
from vmckpt.journal.recorder import JournalStepLog, OrphanedJob, Recorder
from vmckpt.journal.records import NewOperation, Operation, StepState
from vmckpt.lease.controller_lease import host_resource
from vmckpt.model.events import Decided
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy import loader, parse
from vmckpt.policy.model import Policy
from vmckpt.protection import active

_SHOWN = ("guest", "from", "to", "begins_ms", "ends_ms")
POLICY = "policy"
"""Key in an operation's detail: the text of the requested policy, which may come from any file."""


async def begin(orders: Orders, hosts: Hosts, plan: Plan) -> Report:
    """Carry out a plan. Returns the report.

    Raises GuestLocked if another operation holds a lock on the host, Blocked if the host does not
    answer, Cancelled if nothing was done, JournalError, PolicyError, InventoryError, ReadOnly.
    """
    task, caller = orders.task, orders.caller
    told, policy = plan.as_json(), orders.scope.run(task)
    new = NewOperation(
        kind=str(task.kind), guest=task.host, source=task.host,
        policy=policy.name,
        detail={
            "task": task.as_json(), POLICY: loader.text_of(policy) if task.policy else None,
            "expected_ms": told["total_ms"],
            # For display; a controller that continues the run makes a new plan.
            "moves": [{name: one[name] for name in _SHOWN} for one in told["moves"]],
            "left": told["left"],
        },
    )  # fmt: skip
    recorder = await asyncio.to_thread(journal.begin, new, caller.warn)
    try:
        await asyncio.to_thread(recorder.acquire, host_resource(task.host))
        return await carry_out(orders, hosts, plan, recorder)
    except (GuestLocked, Blocked, Cancelled) as exc:
        outcome = Outcome.CANCELLED if isinstance(exc, Cancelled) else Outcome.BLOCKED
        recorder.finish(outcome, {"error": str(exc)})
        raise
    finally:
        await asyncio.to_thread(recorder.close)


async def carry_out(orders: Orders, hosts: Hosts, plan: Plan | None, recorder: Recorder) -> Report:
    """Carry out a run that has begun. Without a plan, the current state determines the moves.

    Raises Blocked or Cancelled if no guest was moved, JournalError, PolicyError, InventoryError.
    """
    task, caller = orders.task, orders.caller

    def tell(event: Decided) -> None:
        recorder.take(event)
        caller.emit(event)

    site = Site(orders, hosts, recorder, NO_CHECKS if plan is None else plan.checks)
    terms = orders.scope.terms(task)
    run = Run(
        site, task, terms, caller.stop, tell=tell, step_log=JournalStepLog(recorder),
        mark=lambda phase: recorder.update(phase=phase),
    )  # fmt: skip
    await site.tidy()
    ended = await run.through(plan)
    await site.tidy()
    started, off = await site.start_again(stopped=ended.stopped)
    ended = replace(ended, left=(*ended.left, *off))
    stay = {one.tenant.name for one in ended.left}
    found = Noted() if recorder.id is None else await asyncio.to_thread(noted, recorder.id, stay)
    told = Report(
        task=task, job=recorder.id, ended=ended, earlier=found.moved,
        shut_down=found.shut or ended.shut_down, suspended=found.saved, started=started,
        bare=found.bare, names=found.called,
    )  # fmt: skip
    recorder.finish(told.outcome, told.as_json())
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What the journal records of a job, from all its controllers."""

    moved: tuple[Arrived, ...] = ()
    shut: tuple[str, ...] = ()
    """UUIDs of guests that were stopped."""
    told: frozenset[str] = frozenset()
    """UUIDs of all guests that were ordered to stop, even if the order failed: a guest may have
    stopped later."""
    saved: frozenset[str] = frozenset()
    """UUIDs of the guests in `shut` whose memory was saved."""
    bare: tuple[Bare, ...] = ()
    called: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names of guests that were moved or stopped, by UUID."""


def noted(job: str, stay: Container[str]) -> Noted:
    """Return what the journal records of a job. `stay`: names of the guests that did not move.

    Raises BadInput if there is no such job; JournalError.
    """
    with jobs.open_journal() as opened:
        parts = opened.parts(job, opened.operation(job, ended=True).began_at)
        steps = opened.steps(job)
    moved = [one for part in parts if (one := reports.arrived_of(part, stay)) is not None]
    moved += reports.stepped((one.intent for one in steps if one.name == MOVE), stay)
    ordered = [one for one in steps if one.name == SHUT_DOWN]
    stops = [one.intent for one in ordered if one.state is not StepState.FAILED]
    again = [one.intent for one in steps if one.name == STANDBY]
    wait, bare = reports.standbys(again, active.active() if again else ())
    called = {one.uuid: one.guest for one in moved}
    named = [one.intent for one in ordered if "guest" in one.intent]
    called |= {str(one["uuid"]): str(one["guest"]) for one in named}
    return Noted(
        called=MappingProxyType(called),
        told=frozenset(str(one.intent["uuid"]) for one in ordered),
        moved=(*moved, *wait), shut=tuple(dict.fromkeys(str(one["uuid"]) for one in stops)),
        saved=frozenset(str(one["uuid"]) for one in stops if one.get("saved")), bare=bare,
    )  # fmt: skip


def in_force(operation: Operation, policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Return the policies; a policy that was requested, as it was when the operation began."""
    name = operation.policy or "policy"
    try:
        asked = parse.parse(operation.detail[POLICY] or "", Path(name))
    except (KeyError, PolicyError):
        return tuple(policies)
    return (asked, *(one for one in policies if one.name != asked.name))


async def settle(case: OrphanedJob, policies: Sequence[Policy], resolve: Resolve) -> Settled:
    """See recovery.Handler. Guests being moved have their own jobs, recovered separately."""
    operation = case.operation
    try:
        task = Task.from_json(operation.detail["task"])
    except (KeyError, ValueError, TypeError):
        return case.ended(Settled(truth="the run had not begun", outcome=Outcome.FAILED))
    doing = f"the {operation.kind} job for {task.host}"
    if case.recorder is None or not case.adopt:
        return Settled(
            truth=f"{doing} is unfinished", outcome=None, goes_on=True,
            settle="run vmckpt recover to continue it",
        )  # fmt: skip
    scope = Scope(inventory=case.inventory, policies=in_force(operation, policies))
    caller = case.caller
    if operation.phase in (PAUSED, STOPPING):
        # The operator had requested that no new moves start.
        caller = replace(caller, stop=asyncio.Event())
        caller.stop.set()
    orders = Orders(scope=scope, task=task, caller=caller, abort=case.caller.stop, resolve=resolve)
    async with Hosts(scope.hosts) as hosts:
        told = await carry_out(orders, hosts, None, case.recorder)
    left = [f"{one.tenant.name}: {one.why}" for one in told.ended.left]
    bare = [f"{one.guest} no longer has a standby: {one.hint}" for one in told.bare]
    how = "was stopped" if told.ended.stopped else "was continued"
    if operation.phase in (PAUSED, STOPPING):
        how = f"was {operation.phase} when its controller died, and has now ended"
    return Settled(
        truth=f"{doing} {how}: {len(told.arrived)} moved in total, {len(left)} outstanding"
        + (f", {len(bare)} without a standby" if bare else ""),
        outcome=told.outcome, did=tuple(f"moved {one.guest} to {one.target}"
                                        for one in told.ended.arrived),
        warnings=(*left, *bare),
    )  # fmt: skip
