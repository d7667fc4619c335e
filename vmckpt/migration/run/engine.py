"""Run one migration: give the order, sample, act or abort, and determine the outcome."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from vmckpt.errors import (
    HypervisorError,
    JournalError,
    MigrationRefused,
    OutcomeUnknown,
    PeerLoginFailed,
)
from vmckpt.journal.records import Request
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.run import actions, decide, operator_requests, progress
from vmckpt.migration.run import outcome as run_outcome
from vmckpt.migration.run.actions import (
    Abort,
    Action,
    LimitBandwidth,
    PauseGuest,
    SetThrottle,
    Stop,
    SwitchToPostcopy,
)
from vmckpt.migration.run.actuator import Actuator
from vmckpt.migration.run.decide import AppliedActions, RunTerms
from vmckpt.migration.run.events import EventEmitter
from vmckpt.migration.run.operator_requests import StepLog
from vmckpt.migration.run.postcopy_recovery import PostcopyRecovery
from vmckpt.migration.run.progress import INTERVAL, ProgressTracker
from vmckpt.model.events import Emit
from vmckpt.model.guest import Presence
from vmckpt.model.migration import (
    Decision,
    Driver,
    FailureSide,
    JobPhase,
    JobSample,
    JobTotals,
    MigrationDriver,
    MoveOrder,
    Outcome,
)
from vmckpt.units import Seconds

# An abort that was sent before the job had started, or was lost, is repeated.
_AGAIN = Seconds(0.5)
_WORKS = Seconds(120.0)


class Aborting:
    """Sends aborts for one migration, and detects that they have no effect."""

    def __init__(self, migrations: MigrationDriver, warn: Callable[[str], None]) -> None:
        self._migrations = migrations
        self._warn = warn
        self._first: Seconds | None = None
        self._last = Seconds(0.0)

    @property
    def in_vain(self) -> bool:
        """Whether aborts have had no effect for `_WORKS`, so no effect is expected any more."""
        return self._first is not None and _now() - self._first > _WORKS

    async def abort(self) -> None:
        """Abort the migration, unless the last abort is less than `_AGAIN` ago."""
        if _now() - self._last < _AGAIN:
            return
        self._last = _now()
        self._first = self._first or _now()
        try:
            await self._migrations.abort()
        except HypervisorError as exc:
            self._warn(f"the abort failed: {exc.message}")


# Requests to switch or pause are refused if no data has moved for this long.
_SILENT = Seconds(2.0)
# How long both hosts are queried before the outcome is reported as unknown.
PATIENCE = Seconds(30.0)
CLIENT_DRIVEN = "client-driven"
# A switch that has had no visible effect for this long is ordered again.
_SWITCH_AGAIN = Seconds(3.0)
# Steps that recovery must undo if this controller dies and the guest stays on the source.
_UNDONE: Mapping[type[Action], Step] = {
    SetThrottle: Step.THROTTLE,
    LimitBandwidth: Step.BANDWIDTH,
    PauseGuest: Step.PAUSE,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The result of one run of the engine."""

    outcome: Outcome
    driver: Driver
    began: Seconds
    elapsed: Seconds
    totals: JobTotals | None
    samples: tuple[JobSample, ...]
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    error: str | None
    refused: FailureSide | None = None
    """The side because of which libvirt refused the migration; None: it did not refuse."""
    switched: Seconds | None = None
    """When the switch to post-copy was ordered; None if it was never ordered."""
    switchover: Seconds | None = None
    """How long the guest was paused for post-copy; None if unknown, or if there was no switch."""


def _refused(error: HypervisorError | None) -> FailureSide | None:
    if not isinstance(error, MigrationRefused):
        return None
    return FailureSide.GUEST if error.of_guest else FailureSide.TARGET


class Migration:
    """One run of the engine. Collects samples, decisions and warnings for the result."""

    def __init__(
        self,
        migrations: MigrationDriver,
        terms: RunTerms,
        emit: Emit,
        stop: asyncio.Event,
        *,
        step_log: StepLog | None = None,
        curve: DirtyCurve = progress.UNKNOWN,
        observe: bool = False,
    ) -> None:
        """`curve`: measured before the migration. `observe`: only report decisions."""
        self._migrations = migrations
        self._actuator = Actuator(migrations)
        self._terms = terms
        self._tell = EventEmitter(emit)
        self._stop = stop
        self._step_log = step_log
        self._observe = observe
        self._done = AppliedActions(max_downtime=terms.max_downtime)
        self._shadow = self._done
        self._would_end = False
        self._told_no_way_back = False
        self._progress = ProgressTracker(curve, terms.policy.stall)
        self._stopped: Stop | None = None
        self._switched: Seconds | None = None
        self.ordered = False
        """Whether libvirt has received the order, or is about to receive it."""
        self._aborting = Aborting(migrations, self._tell.warn)
        self._mending = PostcopyRecovery(
            migrations, terms.policy.recover_for, self._tell.decide, self._tell.warn
        )

    async def run(self, order: MoveOrder) -> Ending:
        """Migrate. Returns the result once the outcome is known, or still unknown after `PATIENCE`.

        Raises HypervisorError if the limits cannot be set; JournalError or LeaseLost from the
        journal.
        """
        await self._actuator.prepare(self._terms.max_downtime, order.auto_converge, self._tell.warn)
        self.ordered = True
        self._progress.begin(_now())
        self._tell.enter(JobPhase.SETUP)
        error = await self._attend(order)
        if isinstance(error, PeerLoginFailed) and self._stopped is None:
            order = dataclasses.replace(order, driver=Driver.CLIENT)
            self._tell.decide(CLIENT_DRIVEN, error.message, "login")
            if self._step_log is not None:
                await self._step_log.intend(Step.DRIVER, {"driver": order.driver})
            error = await self._attend(order)
        if self._done.switched and error is not None:
            error = await self._recover(order, error)
        return await self._ending(order, error)

    async def _ending(self, order: MoveOrder, error: HypervisorError | None) -> Ending:
        """Determine the outcome and clean up. Returns the result."""
        outcome, began = await self._outcome(), self._progress.track.began
        if self._told_no_way_back and outcome is not Outcome.COMPLETED:
            self._stop.set()  # there must be no further attempt
        elapsed = Seconds(_now() - began)
        totals = await self._settled(outcome, order)
        self._tell.enter(JobPhase.DONE)
        return Ending(
            outcome=outcome,
            driver=order.driver,
            began=began,
            elapsed=elapsed,
            totals=totals,
            samples=tuple(self._progress.samples),
            decisions=tuple(self._tell.decisions),
            warnings=tuple(self._tell.warnings),
            error=str(error) if error is not None and outcome is not Outcome.COMPLETED else None,
            refused=_refused(error),
            switched=self._switched,
            switchover=await self._migrations.switchover() if self._done.switched else None,
        )

    async def resume(self, order: MoveOrder) -> Ending:
        """Resume a post-copy that broke under another controller, with its original `order`.

        Returns the result. Raises JournalError or LeaseLost.
        """
        if not self._progress.samples:
            self._progress.begin(_now())
        self._done = dataclasses.replace(self._done, switched=True)
        self._tell.enter(JobPhase.POST_COPY_PAUSED)
        broken = HypervisorError("the previous controller is gone", host="")
        return await self._ending(order, await self._recover(order, broken))

    async def adopt(self, order: MoveOrder) -> Ending:
        """Take over a migration that libvirt drives and whose controller is gone.

        Returns the result. Raises JournalError or LeaseLost.
        """
        self._progress.join(_now())
        self._tell.decide("take over the migration", "the previous controller is gone", "recover")
        while True:
            source, _ = await self._migrations.presence()
            settled = source.reachable and not source.migrating
            if source.post_copy or settled or self._aborting.in_vain:
                break
            await self._turn(call_runs=False)
            await asyncio.sleep(self._progress.until_next())
        if source.post_copy:
            return await self.resume(order)
        gone = HypervisorError("the reason was reported only to the previous controller", host="")
        return await self._ending(order, gone)

    async def _attend(self, order: MoveOrder) -> HypervisorError | None:
        """Give the order and monitor the job until libvirt's call returns.

        Returns the call's error; None if the call succeeded. If the operator must decide, or aborts
        have no effect, returns an error without waiting for the call any longer.
        """
        move = asyncio.create_task(self._migrations.migrate(order), name="move")
        while not move.done():
            await self._turn(call_runs=True)
            if self._mending.broken and self._stop.is_set():
                self._mending.give_up("the operator stopped waiting")
            if self._mending.given_up or self._aborting.in_vain:
                move.add_done_callback(lambda call: call.cancelled() or call.exception())
                return HypervisorError("libvirt's call has not returned", host="")
            await asyncio.wait([move], timeout=self._progress.until_next())
        error = move.exception()
        if error is not None and not isinstance(error, HypervisorError):
            raise error
        return error

    async def _turn(self, *, call_runs: bool) -> None:
        """Take one sample and act on it. `call_runs`: libvirt's migration call has not returned."""
        try:
            sample = await self._migrations.sample()
        except HypervisorError as exc:
            self._tell.warn(f"no statistics: {exc.message}")
            sample = None
        if sample is not None:
            self._take(sample)
        await self._hear()
        if not self._done.switched:
            await self._judge()
            return
        self._no_way_back()
        if call_runs:
            await self._switch_again()
        self._mending.look(self._progress.track, _now(), call_runs=call_runs)

    def _no_way_back(self) -> None:
        """Refuse to stop during post-copy, unless the stream is broken."""
        if self._stop.is_set() and self._stopped is None and not self._mending.broken:
            self._stop.clear()
            self._told_no_way_back = True
            self._tell.decide("continue", "post-copy cannot be cancelled", "operator")

    async def _switch_again(self) -> None:
        """Order the switch to post-copy again if the first order was lost.

        Aborting instead would be unsafe.
        """
        last, ordered = self._progress.track.last, self._switched
        if last is None or ordered is None or last.phase is not JobPhase.PRE_COPY:
            return
        if last.at - ordered > _SWITCH_AGAIN:
            refusal = await self._do(SwitchToPostcopy())
            self._done = dataclasses.replace(self._done, switched=refusal is None)

    def _take(self, raw: JobSample) -> None:
        sample = self._progress.take(raw)
        if sample is None:
            return
        if sample.phase is JobPhase.POST_COPY and not self._done.switched:
            self._done = dataclasses.replace(self._done, switched=True)  # another client ordered it
            self._switched = self._switched or _now()
        self._tell.enter(self._phase_of(sample))
        self._progress.tell(sample, self._done.max_downtime, self._tell.emit)

    def _phase_of(self, sample: JobSample) -> JobPhase:
        if self._stopped is not None:
            return JobPhase.CANCELLING
        if self._mending.broken:
            return JobPhase.POST_COPY_PAUSED
        if self._done.paused and sample.phase is JobPhase.SWITCHOVER:
            return JobPhase.PAUSED
        return sample.phase

    async def _judge(self) -> None:
        """Let the policy decide; with `observe`, only report what the policy would do."""
        stops, now = self._stop.is_set(), _now()
        if self._stopped is not None:
            await self._aborting.abort()
            return
        if self._observe and not stops:
            self._only_say(now)
            return
        verdict, after = decide.decide(
            self._terms, self._progress.track, self._done, now=now, operator_stops=stops
        )
        if verdict is None:
            self._done = after
        elif await self._do(verdict.action) is None:
            self._tell.verdict(verdict, acted=True)
            self._done = after
        else:
            self._done = decide.refused(self._done, verdict.rule, now)

    def _only_say(self, now: Seconds) -> None:
        if self._would_end:
            return
        verdict, self._shadow = decide.decide(
            self._terms, self._progress.track, self._shadow, now=now, operator_stops=False
        )
        if verdict is not None:
            self._would_end = isinstance(verdict.action, Abort)
            self._tell.verdict(verdict, acted=False)

    async def _do(self, action: Action) -> str | None:
        """Carry out an action. Returns None, or why it was refused.

        The reason is also added to the warnings.
        """
        if isinstance(action, Abort):
            self._stopped = action.why
            self._tell.enter(JobPhase.CANCELLING)
            await self._aborting.abort()
            return None
        try:
            await self._intend(action)
            await self._actuator.apply(action)
        except JournalError as exc:
            refusal = f"could not {actions.says(action)}: {exc.message}"
            self._tell.warn(refusal)
            return refusal
        except OutcomeUnknown as exc:
            # Considered done: repeating the action would not help, and the samples show its
            # effect. A pause is different: if it were assumed but had never happened, the guest
            # would keep running and nothing else would be decided.
            refusal = f"no answer to the request to {actions.says(action)}: {exc.message}"
            self._tell.warn(refusal)
            if isinstance(action, PauseGuest):
                return refusal
        except HypervisorError as exc:
            refusal = f"could not {actions.says(action)}: {exc.message}"
            self._tell.warn(refusal)
            if self._step_log is not None and (step := _UNDONE.get(type(action))) is not None:
                await self._step_log.refused(step)
            return refusal
        if isinstance(action, SwitchToPostcopy):
            self._switched = _now()
        return None

    async def _intend(self, action: Action) -> None:
        """Record the action in advance if recovery must undo it after this controller dies."""
        if self._step_log is not None and (step := _UNDONE.get(type(action))) is not None:
            await self._step_log.intend(step, {"what": actions.says(action)})

    async def _hear(self) -> None:
        """Carry out and answer requests from other terminals."""
        for request in self._step_log.take_requests() if self._step_log is not None else ():
            stopping = self._stop.is_set() or self._stopped is not None
            moves = (
                self._progress.track.iteration > 0
                and self._progress.track.silent_for(_now()) < _SILENT
            )
            wanted = operator_requests.resolve_request(
                request, self._terms, self._done, moves=moves, stopping=stopping
            )
            if isinstance(wanted, str):
                self._answer(request, wanted)
            elif isinstance(wanted, Abort):
                self._stop.set()
                self._answer(request, None, "cancelling")
            else:
                refusal, said = await self._do(wanted), actions.says(wanted)
                if refusal is None:
                    self._done = decide.after(self._done, wanted)
                    self._shadow = decide.after(self._shadow, wanted)
                    self._tell.decide(said, f"requested by {request.asked_by}", "operator")
                self._answer(request, refusal, said)

    def _answer(self, request: Request, refusal: str | None, said: str = "") -> None:
        if self._step_log is not None:
            self._step_log.answer(request, ok=refusal is None, text=refusal or said)

    async def _recover(self, order: MoveOrder, error: HypervisorError) -> HypervisorError | None:
        """Resume a broken post-copy until it completes or the operator must decide.

        Returns the last error; None if the last attempt succeeded.
        """
        last: HypervisorError | None = error
        while last is not None and not self._mending.given_up:
            source, target = await self._migrations.presence()
            in_two_parts = source.post_copy or not source.reachable
            if not in_two_parts or run_outcome.settle(source, target, stopped=None) is not None:
                return last
            if self._stop.is_set() and self._mending.broken:
                self._mending.give_up("the operator stopped waiting")
                return last
            if await self._mending.may_resume(target, _now()):
                resumed = dataclasses.replace(order, resume=True)
                last = await self._attend(resumed)
                self._mending.attempted(_now(), last)
            else:
                await self._turn(call_runs=False)
                self._tell.enter(self._phase_of_broken())
                await asyncio.sleep(INTERVAL)
        return last

    def _phase_of_broken(self) -> JobPhase:
        return JobPhase.POST_COPY_PAUSED if self._mending.broken else JobPhase.POST_COPY

    async def _outcome(self) -> Outcome:
        """Query both hosts until the outcome is known, or `PATIENCE` has passed without a job.

        An abort can still take effect meanwhile.
        """
        self._tell.enter(JobPhase.CLEANUP)
        give_up = _now() + PATIENCE
        while True:
            source, target = await self._migrations.presence()
            settled = run_outcome.settle(source, target, stopped=self._stopped)
            if settled is not None:
                if settled is Outcome.COMPLETED and not target.runs:
                    self._tell.warn("the guest is paused on the target, but not by vmckpt")
                return settled
            if self._mending.given_up and source.post_copy:
                return Outcome.POST_COPY_PAUSED
            if source.migrating:
                # The call has returned, but the source's libvirtd is still driving the job.
                await self._turn(call_runs=False)
                if not self._aborting.in_vain:
                    give_up = _now() + PATIENCE
            if _now() > give_up:
                if run_outcome.lost_behind(source, target):
                    return Outcome.LOST
                self._tell.warn(f"the source reports {_said(source)}, the target {_said(target)}")
                return Outcome.UNKNOWN
            await asyncio.sleep(INTERVAL)

    async def _settled(self, outcome: Outcome, order: MoveOrder) -> JobTotals | None:
        """Clean up after the migration. Returns the final statistics; None if there are none."""
        if outcome is Outcome.COMPLETED:
            if self._stopped is not None:
                self._tell.warn("the migration completed before it could be stopped")
            totals = await self._totals()
            await self._actuator.arrived(order, self._tell.warn)
            return totals
        keep = (Outcome.UNKNOWN, Outcome.SHUT_OFF, Outcome.POST_COPY_PAUSED, Outcome.LOST)
        if outcome not in keep:
            await self._actuator.restore(self._tell.warn)
        return None

    async def _totals(self) -> JobTotals | None:
        totals = await self._migrations.totals()
        if totals is None and self._done.switched:
            return None  # libvirt 9.0 has no statistics after post-copy: the source had them
        if totals is None:
            self._tell.warn(
                "libvirt had no final statistics: the downtime is unknown, and the other values"
                " are from samples"
            )
            return None
        return self._progress.numbered(totals)


def _said(one: Presence) -> str:
    return str(one.state or ("no such guest" if one.reachable else "nothing"))


def _now() -> Seconds:
    """Return the event loop's monotonic time. Tests control this clock."""
    return Seconds(asyncio.get_running_loop().time())
