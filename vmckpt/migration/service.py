"""Run one migration command: plan, record, carry out, retry, report."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from vmckpt.errors import (
    BadInput,
    Cancelled,
    GuestLocked,
    HostUnreachable,
    Superseded,
    at_host,
)
from vmckpt.hypervisor import domains
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import jobs
from vmckpt.journal import recorder as journal
from vmckpt.journal.migration_history import PastMove
from vmckpt.journal.recorder import JournalStepLog, Recorder
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.migration import attempt, report, report_builder
from vmckpt.migration.attempt import MigrationContext
from vmckpt.migration.cancellable import cancellable, with_requests_answered
from vmckpt.migration.forecast.measure import Links
from vmckpt.migration.plan import planner
from vmckpt.migration.plan.host_facts import Remotes, logins
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import MigrateRequest, Setting
from vmckpt.migration.trace import Tracer
from vmckpt.model.events import Caller, Checked, Decided, Event, PhaseChanged
from vmckpt.model.guest import Guest
from vmckpt.model.migration import Decision, JobPhase, Mode, Outcome
from vmckpt.policy.model import OnFailure, Policy, Retries
from vmckpt.units import Seconds, show_seconds

OPEN = (Outcome.UNKNOWN, Outcome.POST_COPY_PAUSED)
"""Outcomes that leave the job open: the guest stays locked until recovery settles the job."""


class Attempts:
    """All attempts of one command. `plan_again` makes the plan of each attempt after the first."""

    def __init__(
        self,
        context: MigrationContext,
        recorder: Recorder,
        plan_again: Callable[[], Coroutine[object, object, Plan]],
    ) -> None:
        self._context = context
        self._recorder = recorder
        self._plan_again = plan_again

    async def run(self, begun: MigrationReport, plan: Plan) -> MigrationReport:
        """Make attempts until one succeeds or no further attempt is due.

        `begun`: the report of `plan`; returned with the job's ID if the plan is blocked. Raises
        GuestLocked, HostUnreachable, and the errors of an attempt and of `plan_again`.
        """
        begun = replace(begun, job=self._recorder.id)
        if plan.blocked or plan.policy is None:
            return self._ended(begun)
        told = await self._attempt(plan, 1)
        number = 1
        while should_retry(told, plan.policy, number):
            if not await self._wait(told, plan.policy.retries, number):
                break
            step_log = self._context.step_log
            try:
                plan = await with_requests_answered(
                    self._plan_again(), self._context.stop, step_log
                )
            except Cancelled:
                break
            number += 1
            await step_log.settle(StepState.UNDONE)
            if plan.blocked or plan.policy is None:
                why = "; ".join(at_host(one.where, one.text) for one in plan.blockers)
                told = replace(told, warnings=(*told.warnings, f"no further attempt: {why}"))
                break
            later = await self._attempt(plan, number)
            before = (f"attempt {number - 1}: {told.error}", *told.warnings)
            told = replace(later, warnings=tuple(dict.fromkeys((*before, *later.warnings))))
        return self._ended(told)

    def _ended(self, told: MigrationReport) -> MigrationReport:
        if told.outcome in OPEN:
            self._recorder.update(phase=str(told.outcome))
        else:
            self._recorder.finish(told.outcome, report.as_json(told))
        return told

    async def _attempt(self, plan: Plan, number: int) -> MigrationReport:
        guest, recorder = plan.facts.guest, self._recorder
        assert guest is not None
        assert plan.policy is not None
        recorder.update(
            guest=guest.name,
            policy=plan.policy.name,
            mode=str(plan.mode),
        )
        if plan.outlook is not None:
            limit = round(plan.policy.limits.max_downtime * 1000, 1)
            recorder.forecast(plan.outlook.as_json(plan.mode) | {"max_downtime_ms": limit})
        await self._own(guest)
        carry_out = attempt.run
        if plan.mode is Mode.CHECKPOINT:
            # Imported here: only this mode needs it.
            from vmckpt.migration.epochs import attempt as epochs_attempt  # noqa: PLC0415

            carry_out = epochs_attempt.run
        return replace(await carry_out(plan, self._context), job=recorder.id, attempts=number)

    async def _own(self, guest: Guest) -> None:
        """Lock the guest. Raises GuestLocked, HostUnreachable, LeaseLost or JournalError.

        Preflight checked the guest without a lease: another controller may have moved it since.
        """
        wanted, fence = guest_resource(guest.uuid), self._recorder.fence
        if fence is not None and fence.resource != wanted:
            raise GuestLocked(
                f"a different guest is now named {guest.name}; nothing more was changed",
                hint="run vmckpt guests",
            )
        await asyncio.to_thread(self._recorder.acquire, wanted)
        seen = await domains.presence(self._context.here, guest.uuid)
        if not seen.reachable:
            source = self._context.setting.source.name
            raise HostUnreachable(f"{source} does not answer; nothing was changed", host=source)
        if not seen.runs or seen.migrating:
            raise GuestLocked(
                f"{guest.name} is no longer running on {self._context.setting.source.name}, or is"
                " being migrated; nothing was changed",
                hint="run vmckpt jobs and vmckpt guests, then try again",
            )

    async def _wait(self, told: MigrationReport, retries: Retries, number: int) -> bool:
        """Wait after attempt `number` has failed, before the next attempt.

        Returns False if the migration was cancelled meanwhile.
        """
        wait = wait_before(retries, number)
        reason = f"{told.error or 'attempt failed'}; attempt {number + 1} in {show_seconds(wait)}"
        self._context.emit(Decided(decision=_decided("try again", reason)))
        self._recorder.update(state="waiting")
        try:
            await with_requests_answered(
                asyncio.sleep(wait), self._context.stop, self._context.step_log
            )
        except Cancelled:
            return False
        self._recorder.update(state="running")
        return True


def should_retry(told: MigrationReport, policy: Policy, number: int) -> bool:
    """Return whether to try again after attempt `number`, counted from 1.

    True only if the policy permits it, the guest kept running on the source, and libvirt did not
    refuse the migration, as a second attempt would be refused, too.
    """
    wanted = policy.on_failure is OnFailure.RETRY and number <= policy.retries.times
    return wanted and told.outcome is Outcome.FAILED and told.refused is None


def wait_before(retries: Retries, failed: int) -> Seconds:
    """Return the wait, in seconds, after `failed` failed attempts."""
    wait = retries.first_wait * retries.factor ** (failed - 1)
    return Seconds(min(wait, retries.longest_wait))


def _decided(action: str, reason: str) -> Decision:
    now = Seconds(asyncio.get_running_loop().time())
    return Decision(at=now, action=action, reason=reason, rule="on_failure")


_FRESH = Seconds(30.0)
"""How long preflight's results are considered valid; libvirt checks most of them again."""


async def plan(
    setting: Setting, request: MigrateRequest, caller: Caller, *,
    open_: Remotes | None = None, links: Links | None = None,
) -> Plan:  # fmt: skip
    """Make a plan with a forecast for every mode; change nothing.

    `open_`: as in `migrate`; `links`: link measurements that several plans share.

    Raises Cancelled if `caller.stop` is set; also the errors of `planner.make`.
    """
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        logins(here, there, open_) as remotes,
    ):
        move = MigrationCommand(setting, request, caller, (here, there), remotes)
        return await move.plan(every_mode=True, links=links)


async def migrate(
    setting: Setting, request: MigrateRequest, caller: Caller, open_: Remotes | None = None
) -> MigrationReport:
    """Migrate a guest; with `dry_run` only check whether it can be migrated.

    `open_`: open ssh logins to both hosts that nothing else uses meanwhile; None: open them here.

    Setting `caller.stop` cancels the migration: the job is aborted and the guest is confirmed to
    run on the source. The report shows how the migration ended; errors are raised only if the
    migration could not be started, its steps could not be recorded, or another controller took
    over. Raises Cancelled if the operator stopped the migration before anything was changed.
    """
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        logins(here, there, open_) as remotes,
    ):
        move = MigrationCommand(setting, request, caller, (here, there), remotes)
        if request.dry_run:
            return move.not_begun(await move.plan())
        # Loading the database library takes half a second, about as long as preflight.
        opening = asyncio.create_task(asyncio.to_thread(_record, setting, request, caller))
        try:
            return await move.run(opening)
        finally:
            await asyncio.wait([opening])
            if opening.exception() is None:
                opening.result().close()
            move.close()


def _record(setting: Setting, request: MigrateRequest, caller: Caller) -> Recorder:
    return journal.begin(
        NewOperation(
            kind="migrate",
            guest=request.guest,
            source=setting.source.name,
            target=setting.target.name,
            policy=request.policy,
            detail=_asked(request),
        ),
        caller.warn,
    )


class MigrationCommand:
    """One migration request, with its connections and its listener."""

    def __init__(
        self,
        setting: Setting,
        request: MigrateRequest,
        caller: Caller,
        hosts: tuple[Hypervisor, Hypervisor],
        remotes: Remotes | None,
    ) -> None:
        self._setting = setting
        self._request = request
        self._here, self._there = hosts
        self._remotes = remotes
        self._listener = caller.emit
        self._stop, self._turn = caller.stop, caller.turn
        self._recorder: Recorder | None = None
        self._tracer = Tracer(request.trace) if request.trace is not None else None
        self._early: list[Event] = []

    def _emit(self, event: Event) -> None:
        """Pass an event to the listener, the trace and the journal.

        Events are kept for the journal until it is open.
        """
        if self._recorder is not None:
            self._recorder.take(event)
        else:
            self._early.append(event)
        if self._tracer is not None:
            self._tracer.take(event)
        self._listener(event)

    def close(self) -> None:
        """Close the trace."""
        if self._tracer is not None:
            self._tracer.close()

    def _ahead(self, every_mode: bool, links: Links | None) -> planner.ForecastOptions | None:
        """Return the options of the forecast; None for a dry run, unless `every_mode` is set."""
        if self._request.dry_run and not every_mode:
            return None
        setting = self._setting

        async def past() -> Sequence[PastMove]:
            names = setting.source.name, setting.target.name
            return await asyncio.to_thread(jobs.past_moves, *names)

        request = self._request
        return planner.ForecastOptions(
            past=past, probe=request.probe, every_mode=every_mode,
            closed_too=request.closed_too, links=links,
        )  # fmt: skip

    async def plan(self, *, every_mode: bool = False, links: Links | None = None) -> Plan:
        """Make the plan.

        `every_mode`: forecast all modes. `links`: measurements shared with other plans. Raises
        Cancelled, and the errors of `planner.make`.
        """
        self._emit(PhaseChanged(phase=JobPhase.PREFLIGHT))
        made = await cancellable(
            planner.make(
                self._here,
                self._there,
                self._request.guest,
                policies=self._setting.policies,
                forced=self._request.policy,
                overrides=self._request.overrides,
                remotes=self._remotes,
                ahead=self._ahead(every_mode, links),
            ),
            self._stop,
        )
        self._emit(Checked(findings=made.findings))
        return made

    async def run(self, opening: "asyncio.Task[Recorder]") -> MigrationReport:
        """Plan and migrate; retry after a failure if the policy allows it. Returns the report.

        `opening`: a task that begins the operation in the journal. Raises the errors of `plan` and
        of `Attempts.run`.
        """
        try:
            plan = await self.plan()
        except BaseException as exc:
            (await opening).finish(_how(exc), _said(exc))
            raise
        recorder = self._recorder = await opening
        for event in self._early:
            recorder.take(event)
        steps = JournalStepLog(recorder)
        try:
            plan = await self._in_turn(plan, recorder, steps)
            context = self._migration_context(steps)
            return await Attempts(context, recorder, self.plan).run(self.not_begun(plan), plan)
        except BaseException as exc:
            # Recovery undoes or finishes open steps; only then has the operation ended.
            if not steps.busy:
                recorder.finish(_how(exc), _said(exc))
            raise

    async def _in_turn(self, plan: Plan, recorder: Recorder, steps: JournalStepLog) -> Plan:
        """Wait until the migration may begin.

        Returns `plan`, or a new plan if `plan` is too old by then.
        """
        guest = plan.facts.guest
        if self._turn is None or plan.blocked or guest is None:
            return plan
        looked = asyncio.get_running_loop().time()
        recorder.update(state="waiting", guest=guest.name)
        await with_requests_answered(self._turn(), self._stop, steps)
        if asyncio.get_running_loop().time() - looked >= _FRESH:
            plan = await with_requests_answered(self.plan(), self._stop, steps)
        recorder.update(state="running")
        return plan

    def _migration_context(self, steps: JournalStepLog) -> MigrationContext:
        return MigrationContext(
            setting=self._setting,
            here=self._here,
            there=self._there,
            remotes=self._remotes,
            step_log=steps,
            tracer=self._tracer,
            emit=self._emit,
            stop=self._stop,
            observe=self._request.observe,
        )

    def not_begun(self, plan: Plan) -> MigrationReport:
        """Return the report of a plan that was not carried out."""
        return report_builder.not_begun(plan, self._setting, self._request.guest)


def _asked(request: MigrateRequest) -> dict[str, Any]:
    """Return the parts of the request that are stored in the journal."""
    asked = {"observe": request.observe, "wishes": request.overrides.as_json()}
    return asked if request.part_of is None else {**asked, "part_of": request.part_of}


def _how(exc: BaseException) -> Outcome:
    """Return the outcome of an operation that raised `exc` before libvirt received the order."""
    if isinstance(exc, Cancelled):
        return Outcome.CANCELLED
    refused = isinstance(exc, GuestLocked | BadInput)
    return Outcome.BLOCKED if refused else Outcome.FAILED


def _said(exc: BaseException) -> dict[str, Any]:
    said = {"error": str(exc) or type(exc).__name__}
    return {**said, "dismissed": True} if isinstance(exc, Superseded) else said
