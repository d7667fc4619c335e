"""One migration from the order to the report: plan, record, make room, move, try again."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vmckpt.errors import Cancelled, RemoteError
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.mover import LibvirtMover
from vmckpt.journal import desk
from vmckpt.journal import recorder as journal
from vmckpt.journal.history import PastMove
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.migrate import disks, outlook, planning, report, terms, trace
from vmckpt.migrate.engine import CLIENT_DRIVEN, Ending, Migration
from vmckpt.migrate.gather import Remotes
from vmckpt.migrate.planning import Plan
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.requests import Caller, MigrateRequest, Setting
from vmckpt.migrate.trace import Tracer
from vmckpt.migrate.waiting import served, stoppable
from vmckpt.model.events import Checked, Decided, Event, PhaseChanged
from vmckpt.model.findings import Finding, Severity
from vmckpt.model.images import Made
from vmckpt.model.jobs import Decision, JobPhase, Outcome
from vmckpt.model.orders import Driver, MoveOrder
from vmckpt.policy.types import OnFailure, Policy, Retries
from vmckpt.remote import streams
from vmckpt.units import Seconds, show_seconds

_NOTHING = Seconds(0.0)


async def plan(setting: Setting, request: MigrateRequest, caller: Caller) -> Plan:
    """Everything that is decided before a start, with a forecast for every mode; changes nothing.

    Raises Cancelled if it was stopped.
    """
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        planning.logins(here, there) as remotes,
    ):
        return await _Move(setting, request, caller, (here, there), remotes).plan(every_mode=True)


async def migrate(setting: Setting, request: MigrateRequest, caller: Caller) -> MigrationReport:
    """Migrate a guest, or with `dry_run` only say whether it could be.

    Setting `caller.stop` cancels: the job is aborted and the guest seen running on the source. The
    report says how it ended; errors are raised only for what kept it from beginning. Cancelled is
    raised when it was stopped before anything was changed.
    """
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        planning.logins(here, there) as remotes,
    ):
        move = _Move(setting, request, caller, (here, there), remotes)
        if request.dry_run:
            return move.not_begun(await move.plan())
        # The database library takes half a second to load: that long preflight takes, too.
        opening = asyncio.create_task(asyncio.to_thread(_record, setting, request, caller))
        try:
            return await move.run(opening)
        finally:
            (await opening).close()
            move.close()


def _record(setting: Setting, request: MigrateRequest, caller: Caller) -> Recorder:
    return journal.begin(
        NewOperation(
            kind="migrate",
            guest=request.guest,
            source=setting.source.name,
            target=setting.target.name,
            policy=request.policy,
            detail={"observe": request.observe},
        ),
        caller.warn,
    )


class _Move:
    """One request. Holds the connections and the listener, so that each step stays short."""

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
        self._stop = caller.stop
        self._recorder: Recorder | None = None
        self._order: MoveOrder | None = None
        self._tracer = Tracer(request.trace) if request.trace is not None else None
        self._early: list[Event] = []

    def _emit(self, event: Event) -> None:
        """To the listener and to the journal, which may open a moment later."""
        if self._recorder is not None:
            self._recorder.take(event)
        else:
            self._early.append(event)
        driver = isinstance(event, Decided) and event.decision.action == CLIENT_DRIVEN
        if driver and self._order is not None:
            self._keep_order(replace(self._order, driver=Driver.CLIENT))
        if self._tracer is not None:
            self._tracer.take(event)
        self._listener(event)

    def close(self) -> None:
        """Nothing more is to be told."""
        if self._tracer is not None:
            self._tracer.close()

    def _ahead(self, every_mode: bool) -> planning.Ahead | None:
        """How to look ahead; a dry run only checks."""
        if self._request.dry_run and not every_mode:
            return None
        setting = self._setting

        async def past() -> Sequence[PastMove]:
            names = setting.source.name, setting.target.name
            return await asyncio.to_thread(desk.past_moves, *names)

        return planning.Ahead(past=past, probe=self._request.probe, every_mode=every_mode)

    async def plan(self, *, every_mode: bool = False) -> Plan:
        """Everything that is decided before a start."""
        self._emit(PhaseChanged(phase=JobPhase.PREFLIGHT))
        made = await stoppable(
            planning.make(
                self._here,
                self._there,
                self._request.guest,
                policies=self._setting.policies,
                forced=self._request.policy,
                wishes=self._request.wishes,
                remotes=self._remotes,
                ahead=self._ahead(every_mode),
            ),
            self._stop,
        )
        self._emit(Checked(findings=made.findings))
        return made

    async def run(self, opening: "asyncio.Task[Recorder]") -> MigrationReport:
        """Plan and move, again after a failure if the policy says so."""
        try:
            plan = await self.plan()
            recorder = self._recorder = await opening
            for event in self._early:
                recorder.take(event)
            return await self._attempts(plan, recorder)
        except Cancelled:
            (await opening).finish(Outcome.CANCELLED, None)
            raise
        except BaseException as exc:
            (await opening).finish(Outcome.FAILED, _said(exc))
            raise

    async def _attempts(self, plan: Plan, recorder: Recorder) -> MigrationReport:
        told = await self._attempt(plan, recorder, 1)
        number = 1
        while plan.policy is not None and _again(told, plan.policy, number):
            if not await self._wait(told, plan.policy.retries, number, recorder):
                break
            try:
                plan, number = await served(self.plan(), self._stop, recorder), number + 1
            except Cancelled:
                break
            if plan.blocked:
                why = "; ".join(f"{one.where}: {one.text}" for one in plan.blockers)
                told = replace(told, warnings=(*told.warnings, f"no further attempt: {why}"))
                break
            later = await self._attempt(plan, recorder, number)
            before = (f"attempt {number - 1}: {told.error}", *told.warnings)
            told = replace(later, warnings=tuple(dict.fromkeys((*before, *later.warnings))))
        recorder.finish(told.outcome, report.as_json(told))
        return told

    async def _wait(
        self, told: MigrationReport, retries: Retries, number: int, recorder: Recorder
    ) -> bool:
        """Wait for the next attempt; False if it was stopped meanwhile."""
        wait = wait_before(retries, number)
        reason = f"{told.error or 'it failed'}; attempt {number + 1} in {show_seconds(wait)}"
        self._emit(Decided(decision=_decided("try again", reason)))
        recorder.update(state="waiting")
        try:
            await served(asyncio.sleep(wait), self._stop, recorder)
        except Cancelled:
            return False
        recorder.update(state="running")
        return True

    def _keep_order(self, order: MoveOrder) -> None:
        """For whoever must resume it."""
        self._order = order
        if self._recorder is not None:
            detail = {"observe": self._request.observe, "order": order.as_json()}
            self._recorder.update(detail=detail)

    async def _attempt(self, plan: Plan, recorder: Recorder, number: int) -> MigrationReport:
        if plan.blocked or plan.policy is None or plan.facts.guest is None:
            return replace(self.not_begun(plan), job=recorder.id, attempts=number)
        recorder.update(
            guest=plan.facts.guest.name,
            guest_uuid=plan.facts.guest.uuid,
            policy=plan.policy.name,
            mode=str(plan.mode),
        )
        if plan.outlook is not None:
            recorder.forecast(plan.outlook.as_json(plan.mode))
        order, engine = await planning.order(plan, self._here), self._engine(plan, recorder)
        try:
            made = await served(self._make_images(plan), self._stop, recorder)
        except RemoteError as exc:
            failed = replace(self.not_begun(plan), outcome=Outcome.FAILED, error=str(exc))
            return replace(failed, job=recorder.id, attempts=number)
        ending: Ending | None = None
        troubles: tuple[str, ...] = ()
        self._keep_order(order)
        self._begin_trace(plan)
        try:
            ending = await engine.run(order)
        finally:
            troubles = await self._tidy(plan, made, ending, ordered=engine.ordered)
            if self._tracer is not None:
                self._tracer.end(ending.outcome if ending is not None else Outcome.UNKNOWN)
        observed = await self._observed(plan.facts.guest.name, ending)
        told = self._report(plan, ending, observed, troubles)
        return replace(told, job=recorder.id, attempts=number)

    def _begin_trace(self, plan: Plan) -> None:
        if self._tracer is None or plan.policy is None or plan.facts.guest is None:
            return
        header = trace.Header(
            guest=plan.facts.guest.name,
            memory=plan.facts.guest.memory,
            policy=plan.policy.name,
            mode=plan.mode,
            post_copy=plan.mode.may_switch_early,
            curve=plan.curve,
        )
        self._tracer.begin(header, Seconds(asyncio.get_running_loop().time()))

    def _engine(self, plan: Plan, recorder: Recorder) -> Migration:
        assert plan.policy is not None
        assert plan.facts.guest is not None
        guest = plan.facts.guest
        return Migration(
            mover((self._here, self._there), self._remotes, guest.name, guest.uuid),
            terms.terms(plan.policy, plan.mode, guest, plan.copies.size),
            self._emit,
            self._stop,
            desk=recorder,
            curve=plan.curve,
            observe=self._request.observe,
        )

    async def _make_images(self, plan: Plan) -> Made | None:
        if not plan.copies.copies or self._remotes is None:
            return None
        return await disks.prepare(self._remotes[1], plan.copies)

    async def _tidy(
        self, plan: Plan, made: Made | None, ending: Ending | None, *, ordered: bool
    ) -> tuple[str, ...]:
        """What was made on the target goes if the guest stays; what could not be done is told."""
        if made is None or self._remotes is None:
            return ()
        stays = (Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.NOT_CONVERGED, Outcome.FAILED)
        try:
            if ending is not None and ending.outcome is Outcome.COMPLETED:
                return await disks.finish(self._remotes[1], plan.copies)
            if not ordered or (ending is not None and ending.outcome in stays):
                return await disks.remove(self._remotes[1], made)
        except RemoteError as exc:
            return (f"{exc}",)
        return tuple(f"{path} on {made.host} was made for this move" for path in made.marks)

    async def _observed(self, guest: str, ending: Ending) -> Seconds | None:
        """The blackout that somebody outside saw; None if nobody looked."""
        if self._setting.outside is None or ending.outcome is not Outcome.COMPLETED:
            return None
        until = Seconds(ending.began + ending.elapsed)
        return await self._setting.outside.blackout(guest, ending.began, until)

    def not_begun(self, plan: Plan) -> MigrationReport:
        """The report of a plan that was not carried out."""
        return MigrationReport(
            guest=self._request.guest,
            source=self._setting.source.name,
            target=self._setting.target.name,
            outcome=Outcome.BLOCKED if plan.blocked else Outcome.PLANNED,
            driver=None,
            began=_NOTHING,
            elapsed=_NOTHING,
            totals=None,
            observed_downtime=None,
            warnings=_warnings(plan.findings),
            findings=plan.findings,
            policy=plan.policy.name if plan.policy is not None else None,
            mode=plan.mode if plan.policy is not None else None,
        )

    def _report(
        self, plan: Plan, ending: Ending, observed: Seconds | None, troubles: tuple[str, ...]
    ) -> MigrationReport:
        copied = plan.copies.left_behind if ending.outcome is Outcome.COMPLETED else ()
        return replace(
            self.not_begun(plan),
            guest=plan.facts.guest.name if plan.facts.guest is not None else self._request.guest,
            outcome=ending.outcome,
            driver=ending.driver,
            began=ending.began,
            elapsed=ending.elapsed,
            totals=ending.totals,
            observed_downtime=observed,
            samples=ending.samples,
            decisions=ending.decisions,
            warnings=(*_warnings(plan.findings), *ending.warnings, *troubles),
            error=ending.error,
            switched=ending.switched,
            forecast=_beside(plan, ending),
            left_behind=copied,
        )


def mover(
    hosts: tuple[Hypervisor, Hypervisor], remotes: Remotes | None, guest: str, uuid: str
) -> LibvirtMover:
    """What moves a guest, with a way to free the target's end of a dead stream."""

    async def free_target() -> None:
        if remotes is not None:
            await streams.drop(remotes[1], guest)

    return LibvirtMover(*hosts, uuid, free_target=free_target)


def _beside(plan: Plan, ending: Ending) -> dict[str, Any] | None:
    """What was expected, beside what was measured."""
    if plan.outlook is None:
        return None
    told = plan.outlook.as_json(plan.mode)
    return {**told, "score": outlook.score(plan.outlook, plan.mode, ending)}


def _again(told: MigrationReport, policy: Policy, number: int) -> bool:
    """Whether to try once more: only what failed while the guest went on where it was."""
    wanted = policy.on_failure is OnFailure.RETRY and number <= policy.retries.times
    return wanted and told.outcome is Outcome.FAILED


def wait_before(retries: Retries, failed: int) -> Seconds:
    """How long to wait after that many failed attempts."""
    wait = retries.first_wait * retries.factor ** (failed - 1)
    return Seconds(min(wait, retries.longest_wait))


def _decided(action: str, reason: str) -> Decision:
    now = Seconds(asyncio.get_running_loop().time())
    return Decision(at=now, action=action, reason=reason, rule="on_failure")


def _said(exc: BaseException) -> dict[str, str]:
    return {"error": str(exc) or type(exc).__name__}


def _warnings(findings: tuple[Finding, ...]) -> tuple[str, ...]:
    return tuple(f"{f.where}: {f.text}" for f in findings if f.severity is Severity.WARNING)
