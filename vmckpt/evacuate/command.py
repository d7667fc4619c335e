"""Empty a host, or bring its guests back: from the plan to the report, in the journal."""

import asyncio
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, replace

from vmckpt.errors import Cancelled, GuestBusy, HypervisorError, JournalError, VmckptError
from vmckpt.evacuate import report as reports
from vmckpt.evacuate import scouting
from vmckpt.evacuate.course import Blame
from vmckpt.evacuate.engine import Arrived, Moved, Run
from vmckpt.evacuate.gather import Hosts
from vmckpt.evacuate.links import SETUP
from vmckpt.evacuate.plan import Plan
from vmckpt.evacuate.report import Report
from vmckpt.evacuate.scouting import Scope
from vmckpt.evacuate.seen import Known, Seen
from vmckpt.evacuate.task import Task
from vmckpt.hypervisor import switching
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import desk
from vmckpt.journal import recorder as journal
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.journal.steps import JournalDesk
from vmckpt.lease.types import host_resource
from vmckpt.migrate import command as moves
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.requests import MigrateRequest, Setting
from vmckpt.model.callers import Caller
from vmckpt.model.events import Event, Sampled
from vmckpt.model.jobs import Outcome

SHUT_DOWN = "shut-down"
"""The step of a guest that is asked to shut down."""
Resolve = Callable[[str], Awaitable[Outcome | None]]
"""What a job came to whose end nobody knew; None: that cannot be told yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Who gave the order, and what it may use."""

    scope: Scope
    task: Task
    caller: Caller
    abort: asyncio.Event
    """Set: also what is on its way is to go back."""
    resolve: Resolve


async def begin(orders: Orders, hosts: Hosts, plan: Plan) -> Report:
    """Carry out a plan. Raises GuestBusy if somebody is at that host already, JournalError."""
    task, caller = orders.task, orders.caller
    new = NewOperation(
        kind=str(task.kind), guest=task.host, source=task.host,
        policy=orders.scope.run(task).name,
        detail={"task": task.as_json(), "expected_ms": plan.as_json()["total_ms"]},
    )  # fmt: skip
    recorder = await asyncio.to_thread(journal.begin, new, caller.warn)
    try:
        await asyncio.to_thread(recorder.acquire, host_resource(task.host))
        return await carry_out(orders, hosts, plan, recorder)
    except (GuestBusy, Cancelled) as exc:
        busy = isinstance(exc, GuestBusy)
        outcome = Outcome.BLOCKED if busy else Outcome.CANCELLED
        recorder.finish(outcome, {"error": str(exc)})
        raise
    finally:
        await asyncio.to_thread(recorder.close)


async def carry_out(orders: Orders, hosts: Hosts, plan: Plan | None, recorder: Recorder) -> Report:
    """The same for an operation that has begun, from the facts if there is no plan."""
    task, caller = orders.task, orders.caller

    def tell(event: object) -> None:
        recorder.take(event)  # type: ignore[arg-type]
        caller.emit(event)  # type: ignore[arg-type]

    site = Site(orders, hosts, recorder)
    terms = orders.scope.terms(task)
    run = Run(site, task, terms, caller.stop, tell=tell, desk=JournalDesk(recorder))
    ended = await run.through(plan)
    started = () if ended.stopped else await site.start_again()
    earlier, shut = await asyncio.to_thread(_in_journal, recorder.id)
    told = Report(
        task=task, job=recorder.id, ended=ended, earlier=earlier,
        shut_down=shut or ended.shut_down, started=started,
    )  # fmt: skip
    recorder.finish(told.outcome, told.as_json())
    return told


def _in_journal(job: str | None) -> tuple[tuple[Arrived, ...], tuple[str, ...]]:
    """Who was moved by this job, by whichever controller, and who was asked to shut down."""
    if job is None:
        return (), ()
    with desk.open_journal() as opened:
        parts = opened.parts(job, opened.operation(job, ended=True).began_at)
        steps = [one for one in opened.steps(job) if one.name == SHUT_DOWN]
    moved = tuple(one for part in parts if (one := reports.arrived_of(part)) is not None)
    return moved, tuple(dict.fromkeys(str(one.intent["uuid"]) for one in steps))


class Site:
    """The hosts as a run acts on them; see engine.World."""

    def __init__(self, orders: Orders, hosts: Hosts, recorder: Recorder) -> None:
        self._orders, self._hosts, self._recorder = orders, hosts, recorder
        self._nearing: set[str] = set()

    async def look(self) -> Seen:
        return await scouting.look(self._hosts, self._orders.scope, self._orders.task)

    async def move(self, known: Known, target: str) -> Moved:
        """See engine.World."""
        orders, scope = self._orders, self._orders.scope
        setting = Setting(
            source=scope.host(known.host), target=scope.host(target), policies=scope.once(),
            outside=None,
        )  # fmt: skip
        request = MigrateRequest(
            guest=known.guest.uuid, to=target, from_=known.host, policy=known.policy.name,
            part_of=self._recorder.id,
        )  # fmt: skip
        name = known.name

        def hear(event: Event) -> None:
            if isinstance(event, Sampled) and event.estimate.high is not None:
                (self._nearing.add if event.estimate.high <= SETUP else self._nearing.discard)(name)

        listener = Caller(emit=hear, warn=orders.caller.warn, stop=orders.abort)
        try:
            self._recorder.check()
            found = await moves.migrate(setting, request, listener)
        except Cancelled as exc:
            return Moved(good=False, why=exc.message, final="it was cancelled")
        except (GuestBusy, JournalError) as exc:
            return Moved(good=False, why=exc.message, blame=Blame.GUEST)
        except HypervisorError as exc:
            blame = Blame.GUEST if exc.host == known.host else Blame.TARGET
            return Moved(good=False, why=exc.message, blame=blame)
        except VmckptError as exc:
            return Moved(good=False, why=exc.message)
        finally:
            self._nearing.discard(name)
        return reports.judged(await self._resolved(found), known.guest.name)

    def nearing(self) -> Container[str]:
        """See engine.World."""
        return frozenset(self._nearing)

    async def _resolved(self, found: MigrationReport) -> MigrationReport:
        """Recovery may know how it ended where the migration itself could not."""
        if found.outcome is not Outcome.UNKNOWN or found.job is None:
            return found
        outcome = await self._orders.resolve(found.job)
        return found if outcome is None else replace(found, outcome=outcome)

    async def shut_down(self, known: Known) -> str | None:
        """See engine.World."""
        host = self._orders.scope.host(known.host)
        limit = known.policy.evacuation.shutdown
        try:
            # Whoever brings guests back must know whom to start, whatever becomes of us.
            await asyncio.to_thread(self._recorder.intend, SHUT_DOWN, {"uuid": known.guest.uuid})
            async with Hypervisor(host) as hypervisor:
                await switching.shut_down(hypervisor, known.guest.uuid, limit)
        except VmckptError as exc:
            return exc.message
        return None

    async def start_again(self) -> tuple[str, ...]:
        """Guests that were shut down before; whoever does not start is told of."""
        task, started = self._orders.task, []
        if not task.start:
            return ()
        async with Hypervisor(self._orders.scope.host(task.host)) as hypervisor:
            for uuid in sorted(task.start):
                try:
                    name = await switching.start(hypervisor, uuid)
                except HypervisorError as exc:
                    self._orders.caller.warn(f"guest {uuid} was not started: {exc.message}")
                    continue
                if name is not None:
                    started.append(name)
        return tuple(started)
