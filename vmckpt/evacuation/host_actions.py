"""Carry out the actions of a run on the hosts."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from vmckpt.errors import (
    Cancelled,
    GuestLocked,
    HypervisorError,
    JournalError,
    LeaseLost,
    VmckptError,
)
from vmckpt.evacuation import offline_move, restart
from vmckpt.evacuation import report as reports
from vmckpt.evacuation.arrival_estimate import ArrivalEstimates
from vmckpt.evacuation.bandwidth import Streams
from vmckpt.evacuation.interfaces import Moved, Turn
from vmckpt.evacuation.plan import planner
from vmckpt.evacuation.plan.gather import Hosts
from vmckpt.evacuation.plan.inventory import FleetView, Known, TravelMethod
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.plan.plan import Checks
from vmckpt.evacuation.plan.planner import Scope
from vmckpt.evacuation.task import Task
from vmckpt.hypervisor import lifecycle
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import jobs
from vmckpt.journal.cancel_requests import stop_requested
from vmckpt.journal.evacuation_progress import MOVE, SHUT_DOWN, STANDBY
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import StepState
from vmckpt.migration import service as moves
from vmckpt.migration.plan import preflight
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import MigrateRequest, PolicyOverrides, Setting
from vmckpt.model.events import Caller, Event, OnItsWay, Sampled
from vmckpt.model.migration import FailureSide, Mode, Outcome
from vmckpt.protection import active, relocate_standby
from vmckpt.protection import stop as protection_stop
from vmckpt.units import BytesPerSecond, Seconds

Resolve = Callable[[str], Awaitable[Outcome | None]]
"""Recovers a job with an unknown outcome. Returns the outcome, or None if it is still unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The order for an evacuation, repopulation or balancing, with its settings and callbacks."""

    scope: Scope
    task: Task
    caller: Caller
    abort: asyncio.Event
    """When set, running moves are cancelled, too."""
    resolve: Resolve


class Site:
    """The hosts that a run acts on; implements interfaces.World."""

    def __init__(self, orders: Orders, hosts: Hosts, recorder: Recorder, checks: Checks) -> None:
        self._orders, self._hosts, self._recorder = orders, hosts, recorder
        self._checks = checks
        self._nearing, self._streams = ArrivalEstimates(), Streams()

    async def look(self) -> FleetView:
        return await planner.gather_fleet(self._hosts, self._orders.scope, self._orders.task)

    async def move(self, known: Known, target: str, turn: Turn) -> Moved:
        """See interfaces.World."""
        try:
            if known.way is not TravelMethod.LIVE:
                await turn.wait()
            self._recorder.check()
            match known.way:
                case TravelMethod.LIVE:
                    return await self._migrate(known, target, turn)
                case TravelMethod.OFFLINE:
                    return await self._define(known, target)
                case TravelMethod.SWITCH:
                    return await self._switch(known, target)
                case TravelMethod.ANEW:
                    return await self._protect(known, target)
        except Cancelled as exc:
            return Moved(good=False, why=exc.message, final="the move was cancelled")
        except (GuestLocked, JournalError) as exc:
            return Moved(good=False, why=exc.message, blame=FailureSide.GUEST)
        except VmckptError as exc:
            blame = FailureSide.GUEST if exc.host == known.host else FailureSide.TARGET
            return Moved(good=False, why=exc.message, blame=blame)
        finally:
            self._nearing.ended(known.name)
            self._streams.ended(known.name)

    async def _migrate(self, known: Known, target: str, turn: Turn) -> Moved:
        """Migrate a guest; if an interrupted job holds a lock on it, recover that job first.

        Recovery may have failed at the start of the run because that job's target did not answer.
        """
        try:
            return await self._migrate_once(known, target, turn)
        except GuestLocked:
            job = await asyncio.to_thread(jobs.interrupted, known.guest.uuid)
            if job is None or await self._orders.resolve(job) is None:
                raise
            return await self._migrate_once(known, target, turn)

    async def _migrate_once(self, known: Known, target: str, turn: Turn) -> Moved:
        """Migrate a guest with an ordinary migration that is part of this job."""
        orders, scope, name = self._orders, self._orders.scope, known.name
        setting = Setting(
            source=scope.inventory.host(known.host), target=scope.inventory.host(target),
            policies=scope.once(), outside=None,
        )  # fmt: skip
        # The plan has measured the link, and another measurement would delay other moves.
        check = self._checks.get((name, target))
        if check is not None and check.mode not in set(Mode):
            check = None  # the guest was off or protected when the plan was made
        request = MigrateRequest(
            guest=known.guest.uuid, to=target, from_=known.host, policy=known.policy.name,
            part_of=self._recorder.id, probe=None if check is None else Seconds(0.0),
            overrides=PolicyOverrides(mode=None if check is None else Mode(check.mode)),
        )  # fmt: skip

        async def own_turn() -> None:
            await turn.wait()
            self._recorder.check()  # the wait may have been long
            self._nearing.begins(name, check, _now())

        def tell(event: Sampled | None) -> None:
            orders.caller.emit(OnItsWay(guest=name, target=target, sampled=event))

        def hear(event: Event) -> None:
            if isinstance(event, Sampled):
                sample = event.sample
                self._streams.heard(name, sample)
                carried = self._streams.carry().get(name)
                self._nearing.measured(name, event.estimate, sample, carried)
                tell(event)

        async with (
            stop_requested(orders.abort) as stop,
            self._hosts.logins(known.host, target) as logins,
        ):
            listener = Caller(emit=hear, warn=orders.caller.warn, stop=stop, turn=own_turn)
            try:
                found = await moves.migrate(setting, request, listener, logins)
            finally:
                tell(None)
        for one in found.stays:
            orders.caller.warn(f"{name}: {one}")
        return reports.judged(await self._resolved(found), known.guest.name)

    async def _in_no_hands(self, uuid: str) -> None:
        """Check that no operation holds a lock on the guest; recover an interrupted operation.
        Raises GuestLocked."""
        try:
            await asyncio.to_thread(jobs.require_unlocked, uuid)
        except GuestLocked:
            job = await asyncio.to_thread(jobs.interrupted, uuid)
            if job is None or await self._orders.resolve(job) is None:
                raise

    async def _define(self, known: Known, target: str) -> Moved:
        """Move a guest that is off, unless another operation holds a lock on it."""
        orders, began = self._orders, time.monotonic()
        host = orders.scope.inventory.host

        def tell(event: Sampled | None) -> None:
            orders.caller.emit(OnItsWay(guest=known.name, target=target, sampled=event))

        await self._in_no_hands(known.guest.uuid)
        await self.tidy()  # an earlier attempt may have left images that are in the way
        async with (
            self._step(known, target),
            stop_requested(orders.abort) as stop,
            self._hosts.logins(known.host, target) as remotes,
        ):
            ends = offline_move.Ends(source=host(known.host), target=host(target), remotes=remotes)
            try:
                troubles = await offline_move.move(known, ends, self._recorder, stop, tell)
            finally:
                tell(None)
        for one in troubles:
            orders.caller.warn(one)
        return Moved(good=True, took=Seconds(time.monotonic() - began))

    async def tidy(self) -> None:
        """Remove the images of failed moves; warn about images that stay. Raises JournalError."""
        job = self._recorder.id
        if job is None or not (open_ := await asyncio.to_thread(offline_move.left_by, job)):
            return
        host = self._orders.scope.inventory.host
        with suppress(LeaseLost):  # then another controller removes them
            for one in await offline_move.undo_left(
                open_, host, self._hosts.logins, self._recorder
            ):
                self._orders.caller.warn(one)

    @asynccontextmanager
    async def _step(
        self, known: Known, target: str, step: str = MOVE, **more: str
    ) -> AsyncIterator[None]:
        """Record an action that has no job of its own as a step of this job.

        `vmckpt repopulate` and commands that show the job read this step.
        """
        intent = {
            "guest": known.guest.name, "uuid": known.guest.uuid, "from": known.host, "to": target,
            "called": known.name, **more,
        }  # fmt: skip
        number = await asyncio.to_thread(self._recorder.intend, step, intent)
        async with self._concluded(number):
            yield

    @asynccontextmanager
    async def _concluded(self, number: int) -> AsyncIterator[None]:
        """Record the result of a step. If the process is killed, the step stays open."""
        try:
            yield
        except VmckptError:
            await self._conclude(number, StepState.FAILED)
            raise
        await self._conclude(number, StepState.DONE)

    async def _conclude(self, number: int, state: StepState) -> None:
        """Record the result of a step, for display only: recovery queries the hosts instead."""
        with suppress(JournalError, LeaseLost):
            await asyncio.to_thread(self._recorder.conclude, number, state)

    async def _protect(self, known: Known, target: str) -> Moved:
        """Replace a standby, whose guest runs elsewhere, with a standby on `target`.

        A failure is attributed to the target only if the blocker or the error names the target: the
        guest's host or the old backup may be the cause.
        """
        orders, began = self._orders, time.monotonic()
        another = await asyncio.to_thread(planner.another, orders.scope, known, target)
        final = ""
        try:
            async with stop_requested(orders.abort) as stop:
                caller = Caller(emit=lambda _: None, warn=orders.caller.warn, stop=stop)
                if against := preflight.blockers(
                    (await relocate_standby.require_relocatable(another, caller)).findings
                ):
                    blame = FailureSide.TARGET if against[0].where == target else FailureSide.GUEST
                    return Moved(
                        good=False, why=f"{against[0].where}: {against[0].text}", blame=blame
                    )
                async with self._step(known, target, STANDBY, command=another.words):
                    final = another.words
                    done = await relocate_standby.move(another, caller)
        except VmckptError as exc:
            if final:  # the old standby may be gone, so another attempt would not find it
                orders.caller.warn(f"{another.guest} may have no standby now: {exc.message}")
            blame = FailureSide.TARGET if exc.host == target else FailureSide.GUEST
            return Moved(good=False, why=exc.message, blame=blame, final=final)
        return Moved(good=True, job=done.job, took=Seconds(time.monotonic() - began))

    async def _switch(self, known: Known, target: str) -> Moved:
        """Switch a protected guest to its standby, without loss. The guest then has no standby."""
        caller = self._orders.caller
        # A run that is stopped lets the switchover finish.
        async with stop_requested(self._orders.abort) as stop, self._step(known, target):
            ended = await protection_stop.planned(
                active.of(self._orders.scope.inventory, known.guest.uuid),
                replace(caller, stop=stop),
            )
        caller.warn(
            f"{known.name} no longer has a standby; once its old host is available again, run"
            f" vmckpt protect {known.name} --reverse"
        )
        return Moved(good=True, took=ended.took)

    def nearing(self) -> Container[str]:
        """See interfaces.World."""
        return self._nearing.names(_now())

    def streams(self) -> Mapping[str, BytesPerSecond]:
        """See interfaces.World."""
        return self._streams.carry()

    async def _resolved(self, found: MigrationReport) -> MigrationReport:
        """Return the report; an unknown outcome is replaced if recovery finds the outcome."""
        if found.outcome is not Outcome.UNKNOWN or found.job is None:
            return found
        outcome = await self._orders.resolve(found.job)
        return found if outcome is None else replace(found, outcome=outcome)

    async def stop(self, known: Known) -> str | None:
        """See interfaces.World."""
        host, uuid = self._orders.scope.inventory.host(known.host), known.guest.uuid
        limit = known.policy.evacuation.shutdown
        try:
            await self._in_no_hands(uuid)
            # Repopulate must know which guests to start, even if this process dies.
            intent = {"uuid": uuid, "guest": known.guest.name, "saved": known.suspends}
            number = await asyncio.to_thread(self._recorder.intend, SHUT_DOWN, intent)
            async with self._concluded(number), Hypervisor(host) as hypervisor:
                if known.suspends:
                    await lifecycle.suspend(hypervisor, uuid)
                else:
                    await lifecycle.shut_down(hypervisor, uuid, limit)
        except VmckptError as exc:
            return exc.message
        return None

    async def start_again(self, *, stopped: bool) -> tuple[tuple[str, ...], tuple[Unplaced, ...]]:
        """Start the guests that an evacuation stopped. Returns the names of the started guests, and
        the guests that were not started.

        `stopped`: the run was stopped, so no guest is started. Raises the errors of World.look.
        """
        task, scope = self._orders.task, self._orders.scope
        if not task.start:
            return (), ()
        if stopped:
            why, named = "the run stopped before the guest was started", dict(task.called)
            return (), tuple(
                reports.off(named.get(one, one), task.host, why) for one in sorted(task.start)
            )
        found = restart.decide(task, await self.look())
        for said in found.elsewhere:
            self._orders.caller.warn(said)
        started, off = list[str](), list(found.left)
        for uuid, tenant in found.starts.items():
            try:
                async with Hypervisor(scope.inventory.host(task.host)) as hypervisor:
                    name = await lifecycle.start(hypervisor, uuid)
            except HypervisorError as exc:
                off.append(reports.off(tenant.name, task.host, exc.message))
            else:
                started += [] if name is None else [name]
        return tuple(started), tuple(off)


def _now() -> Seconds:
    return Seconds(asyncio.get_running_loop().time())
