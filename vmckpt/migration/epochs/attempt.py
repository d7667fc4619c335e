"""One attempt to migrate a guest in mode checkpoint.

Agents on both hosts copy the guest until the last epoch is small enough; that epoch completes the
move. This module decides when to switch over; `protection` carries out the switchover.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vmckpt.errors import BadInput, LeaseLost, VmckptError
from vmckpt.hypervisor import domains
from vmckpt.journal.records import Request, StepState
from vmckpt.migration import attempt, report_builder
from vmckpt.migration import request as migration_request
from vmckpt.migration.attempt import MigrationContext
from vmckpt.migration.cancellable import with_requests_answered
from vmckpt.migration.epochs import request as epochs_request
from vmckpt.migration.epochs.samples import Sampler
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.run import operator_requests, progress
from vmckpt.migration.run.actions import Abort, SetDowntime
from vmckpt.migration.run.decide import AppliedActions
from vmckpt.migration.run.events import EventEmitter
from vmckpt.model.events import Caller, Sampled
from vmckpt.model.migration import Driver, JobPhase, JobTotals, Outcome
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.migration import finish, switchover
from vmckpt.protection.migration.finish import Pair
from vmckpt.protection.migration.switchover import (
    Limits,
    SwitchoverAction,
    SwitchoverDecision,
    SwitchoverFacts,
)
from vmckpt.protection.request import Setting
from vmckpt.protection.start import Beginning
from vmckpt.units import Bytes, Seconds

_TURN = 0.5
"""Seconds between two queries of the source's agent; each query starts a process there."""
_SILENT = Seconds(30.0)
"""How long the source's agent may be silent, for example while the watchdog restarts the agent."""


class _Stopped(Exception):
    """The migration must be called off: the operator stopped it, or its time limit has passed."""

    def __init__(self, outcome: Outcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


async def run(plan: Plan, context: MigrationContext) -> MigrationReport:
    """Carry out a plan, as `migration.attempt.run` does.

    Raises BadInput if decisions are to be observed or traced, which this mode does not support;
    Cancelled or VmckptError if the migration cannot begin; LeaseLost if another controller has
    taken over.
    """
    if context.observe or context.tracer is not None:
        raise BadInput(
            "--observe and --trace are not supported in mode checkpoint",
            hint="leave these options out, or choose another --mode",
        )
    return await _Attempt(plan, context).run()


class _Attempt:
    def __init__(self, plan: Plan, context: MigrationContext) -> None:
        assert plan.policy is not None
        assert plan.facts.guest is not None
        self._plan, self._context = plan, context
        self._policy, self._guest = plan.policy, plan.facts.guest
        self._tell = EventEmitter(context.emit)
        self._terms = migration_request.terms(plan.policy, plan.mode, self._guest, plan.copies.size)
        self._limit = plan.policy.limits.max_downtime
        self._asked = False
        """Whether the source was asked to switch over."""
        self._share = 0.0
        self._heard = self._began = _now()
        self._sampler = Sampler(Bytes(self._guest.memory + plan.copies.size))

    async def run(self) -> MigrationReport:
        context, setting = self._context, self._context.setting
        self._tell.enter(JobPhase.SETUP)
        looked = await with_requests_answered(
            agent_client.order(setting.source, self._guest.uuid, "look"),
            context.stop,
            context.step_log,
        )
        beginning = Beginning(
            Setting(primary=setting.source, backup=setting.target, lease=None),
            epochs_request.request(
                self._policy, self._guest, setting.target.name, self._plan.copies
            ),
            self._guest, looked=looked, step_log=context.step_log,
            caller=Caller(emit=context.emit, warn=self._tell.warn, stop=context.stop),
        )  # fmt: skip
        pair = Pair(
            guest=self._guest.name, uuid=self._guest.uuid, source=setting.source,
            target=setting.target, session=beginning.session,
        )  # fmt: skip
        await beginning.intend()
        try:
            await beginning.start()
            given = await self._follow(pair)
        except LeaseLost:
            raise  # the controller that has the lease now recovers the migration
        except (VmckptError, _Stopped) as exc:
            return await self._called_off(pair, exc)
        except BaseException:
            with suppress(VmckptError):
                await asyncio.shield(finish.call_off(pair, self._tell.warn))
            raise
        return await self._given(pair, given)

    async def _follow(self, pair: Pair) -> Mapping[str, Any]:
        """Wait until the source has handed the guest over. Returns the agent's handover record.

        Raises _Stopped if the migration must be called off; VmckptError if the source's agent has
        stopped or does not answer; LeaseLost.
        """
        while True:
            await self._hear()
            if self._context.stop.is_set():
                raise _Stopped(Outcome.CANCELLED, "the operator stopped the migration")
            ours = await agent_client.status(pair.source, pair.uuid)
            if finish.is_given(ours):
                return dict(ours.told["given"])
            self._must_go_on(pair, ours)
            verdict = switchover.decide(
                self._seen(ours), Limits(max_downtime=self._limit, time=self._terms.time_limit)
            )
            self._sample(ours, verdict)
            if verdict.do is SwitchoverAction.GIVE_UP:
                self._tell.decide("give up", verdict.why, "time limit")
                raise _Stopped(Outcome.TIMED_OUT, verdict.why)
            if verdict.do is SwitchoverAction.SWITCH and not ours.told.get("wished"):
                await self._switch(pair, verdict)
            await asyncio.sleep(_TURN)

    def _must_go_on(self, pair: Pair, ours: ProtectionStatus) -> None:
        """Raise VmckptError if the source's agent has stopped, or has not answered for too long."""
        if ours.agent:
            self._heard = _now()
        why = ours.why or ours.says or ours.error or "no reason reported"
        ended = ours.outcome is not None or ours.knows_nothing
        if ended or _now() - self._heard > _SILENT:
            raise VmckptError(
                f"vmckpt's agent on {pair.source.name} has stopped, or does not answer: {why}"
            )

    def _seen(self, ours: ProtectionStatus) -> SwitchoverFacts:
        costs = tuple(
            switchover.Cost(pause=Seconds(one["pause_s"]), busy=Seconds(one["busy_s"]))
            for one in ours.told.get("recent") or ()
        )
        ready = ours.phase == "protecting"
        return SwitchoverFacts(elapsed=Seconds(_now() - self._began), ready=ready, recent=costs)

    def _sample(self, ours: ProtectionStatus, verdict: SwitchoverDecision) -> None:
        sample = self._sampler.take(_now(), ours.told, verdict.downtime)
        if sample is None:
            return
        self._tell.enter(sample.phase)
        guess = progress.estimate(self._sampler.samples, self._limit)
        elapsed = Seconds(_now() - self._began)
        self._share = max(self._share, progress.share_done(guess, elapsed))
        self._tell.emit(Sampled(sample=sample, estimate=guess, done=self._share))

    async def _switch(self, pair: Pair, verdict: SwitchoverDecision) -> None:
        """Ask the source's agent for the last epoch. Raises LeaseLost.

        Any other failure becomes a warning, and the caller asks again.
        """
        if not self._asked:
            self._tell.decide("switch", verdict.why, "caught up")
        self._asked = True
        try:
            self._context.step_log.check()
            await agent_client.order(pair.source, pair.uuid, "ask", wish="planned")
        except LeaseLost:
            raise
        except VmckptError as exc:
            self._tell.warn(str(exc))

    async def _hear(self) -> None:
        for request in self._context.step_log.take_requests():
            self._answer(request)

    def _answer(self, request: Request) -> None:
        step_log, stopping = self._context.step_log, self._context.stop.is_set()
        done = AppliedActions(max_downtime=self._limit)
        wanted = operator_requests.resolve_request(
            request, self._terms, done, moves=True, stopping=stopping
        )
        match wanted:
            case Abort():
                self._context.stop.set()
                step_log.answer(request, ok=True, text="cancelling")
            case SetDowntime(limit):
                self._limit = limit
                text = f"the last epoch begins when it is expected to take at most {limit:g} s"
                step_log.answer(request, ok=True, text=text)
            case str():
                step_log.answer(request, ok=False, text=wanted)
            case _:
                step_log.answer(request, ok=False, text="not available in mode checkpoint")

    async def _given(self, pair: Pair, noted: Mapping[str, Any]) -> MigrationReport:
        """Confirm that the guest runs on the target, after the source has handed it over.

        Returns the report.
        """
        self._tell.enter(JobPhase.CLEANUP)
        try:
            told = await finish.finish(pair, self._tell.warn)
        except VmckptError as exc:
            return await self._unknown(exc)
        if told is None:
            return await self._ended(Outcome.FAILED, f"{pair.target.name} could not run the guest")
        stood, took = noted.get("stood_s"), told.told.get("took_s")
        downtime = None if stood is None or took is None else Seconds(float(stood) + float(took))
        if self._context.stop.is_set():
            self._tell.warn("the migration completed before it could be stopped")
        return await self._ended(Outcome.COMPLETED, None, downtime)

    async def _called_off(self, pair: Pair, why: Exception) -> MigrationReport:
        """Call off the migration: the guest stays on the source unless it was handed over.

        `why`: the error that ended the migration. Returns the report. Raises LeaseLost.
        """
        self._tell.enter(JobPhase.CANCELLING)
        outcome = why.outcome if isinstance(why, _Stopped) else Outcome.FAILED
        try:
            ours = await agent_client.status(pair.source, pair.uuid)
            if finish.is_given(ours):
                return await self._given(pair, ours.told["given"])
            self._context.step_log.check()
            arrived = await finish.call_off(pair, lambda _: None)
        except LeaseLost:
            raise
        except VmckptError as exc:
            return await self._unknown(exc, why)
        if arrived is not None:
            self._tell.warn(f"the migration completed before it could be aborted: {why}")
            return await self._ended(Outcome.COMPLETED, None)
        seen = await domains.presence(self._context.here, self._guest.uuid)
        if seen.reachable and not (seen.state is not None and seen.state.is_active):
            outcome = Outcome.SHUT_OFF
        return await self._ended(outcome, str(why))

    async def _unknown(self, trouble: VmckptError, why: Exception | None = None) -> MigrationReport:
        """Return the report of an unknown outcome, which recovery determines.

        `trouble`: the error that prevents an answer; `why`: the error that ended the migration.
        """
        for one in (why, trouble):
            if one is not None:
                self._tell.warn(str(one))
        return await self._ended(Outcome.UNKNOWN, str(why or trouble))

    async def _ended(
        self, outcome: Outcome, error: str | None, downtime: Seconds | None = None
    ) -> MigrationReport:
        context, elapsed = self._context, Seconds(_now() - self._began)
        self._tell.enter(JobPhase.DONE)
        if outcome not in (Outcome.COMPLETED, Outcome.UNKNOWN):
            await context.step_log.settle(StepState.UNDONE)
        begun = report_builder.not_begun(self._plan, context.setting, self._guest.name)
        completed = outcome is Outcome.COMPLETED
        totals = JobTotals(
            total=elapsed, setup=self._sampler.setup(self._began), downtime=downtime,
            iterations=self._sampler.epochs, transferred=self._sampler.sent,
        )  # fmt: skip
        return replace(
            begun, outcome=outcome, driver=Driver.AGENTS, began=self._began, elapsed=elapsed,
            totals=totals if completed else None, samples=tuple(self._sampler.samples),
            observed_downtime=await attempt.observed(
                context, self._guest.name, outcome, self._began, elapsed
            ),
            decisions=tuple(self._tell.decisions),
            warnings=(*begun.warnings, *self._tell.warnings), error=error,
            left_behind=self._plan.copies.left_behind if completed else (),
        )  # fmt: skip


def _now() -> Seconds:
    return Seconds(asyncio.get_running_loop().time())
