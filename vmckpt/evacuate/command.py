"""Empty a host, or bring its guests back: from the plan to the report, in the journal."""

import asyncio
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from vmckpt.errors import (
    Blocked,
    Cancelled,
    GuestBusy,
)
from vmckpt.evacuate import report as reports
from vmckpt.evacuate.engine import Run
from vmckpt.evacuate.gather import Hosts
from vmckpt.evacuate.plan import NO_CHECKS, Plan
from vmckpt.evacuate.report import Bare, Report
from vmckpt.evacuate.site import Orders, Site
from vmckpt.evacuate.world import Arrived
from vmckpt.journal import jobs
from vmckpt.journal import recorder as journal
from vmckpt.journal.evacuation_progress import MOVE, SHUT_DOWN, STANDBY
from vmckpt.journal.recorder import JournalDesk, Recorder
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.lease.controller_lease import host_resource
from vmckpt.model.events import Decided
from vmckpt.model.migration import Outcome
from vmckpt.policy import loader
from vmckpt.protection import active

_SHOWN = ("guest", "from", "to", "begins_ms", "ends_ms")
POLICY = "policy"
"""In an operation's detail: the text of the one that was asked for, which may be any file."""


async def begin(orders: Orders, hosts: Hosts, plan: Plan) -> Report:
    """Carry out a plan. Raises GuestBusy if somebody is at that host already, Blocked if it is
    silent: nothing was done. JournalError."""
    task, caller = orders.task, orders.caller
    told, policy = plan.as_json(), orders.scope.run(task)
    new = NewOperation(
        kind=str(task.kind), guest=task.host, source=task.host,
        policy=policy.name,
        detail={
            "task": task.as_json(), POLICY: loader.text_of(policy) if task.policy else None,
            "expected_ms": told["total_ms"],
            # For those who look on; who goes on with it makes a new plan.
            "moves": [{name: one[name] for name in _SHOWN} for one in told["moves"]],
            "left": told["left"],
        },
    )  # fmt: skip
    recorder = await asyncio.to_thread(journal.begin, new, caller.warn)
    try:
        await asyncio.to_thread(recorder.acquire, host_resource(task.host))
        return await carry_out(orders, hosts, plan, recorder)
    except (GuestBusy, Blocked, Cancelled) as exc:
        outcome = Outcome.CANCELLED if isinstance(exc, Cancelled) else Outcome.BLOCKED
        recorder.finish(outcome, {"error": str(exc)})
        raise
    finally:
        await asyncio.to_thread(recorder.close)


async def carry_out(orders: Orders, hosts: Hosts, plan: Plan | None, recorder: Recorder) -> Report:
    """The same for an operation that has begun, from the facts if there is no plan."""
    task, caller = orders.task, orders.caller

    def tell(event: Decided) -> None:
        recorder.take(event)
        caller.emit(event)

    site = Site(orders, hosts, recorder, NO_CHECKS if plan is None else plan.checks)
    terms = orders.scope.terms(task)
    run = Run(
        site, task, terms, caller.stop, tell=tell, desk=JournalDesk(recorder),
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
        bare=found.bare,
    )  # fmt: skip
    recorder.finish(told.outcome, told.as_json())
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What the journal has of a job, by whichever controller."""

    moved: tuple[Arrived, ...] = ()
    shut: tuple[str, ...] = ()
    """UUIDs of guests that were stopped."""
    told: frozenset[str] = frozenset()
    """Of all that were told to stop: one that was given up may have stopped later."""
    saved: frozenset[str] = frozenset()
    """Those of them that were saved."""
    bare: tuple[Bare, ...] = ()
    called: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Names of those that were moved or stopped, by UUID."""


def noted(job: str, stay: Container[str]) -> Noted:
    """`stay`: who was left where it was. Raises BadInput: no such job; JournalError."""
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
