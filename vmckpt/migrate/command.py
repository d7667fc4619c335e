"""One migration from the order to the report: plan, record, and carry out."""

import asyncio
from collections.abc import Sequence
from typing import Any

from vmckpt.errors import BadInput, Cancelled, Dismissed, GuestBusy
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import jobs
from vmckpt.journal import recorder as journal
from vmckpt.journal.migration_history import PastMove
from vmckpt.journal.recorder import JournalDesk, Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.migrate import planning, reporting
from vmckpt.migrate.attempt import Around
from vmckpt.migrate.attempts import Attempts
from vmckpt.migrate.gather import Remotes, logins
from vmckpt.migrate.measure import Links
from vmckpt.migrate.planning import Plan
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.requests import MigrateRequest, Setting
from vmckpt.migrate.trace import Tracer
from vmckpt.migrate.waiting import served, stoppable
from vmckpt.model.events import Caller, Checked, Event, PhaseChanged
from vmckpt.model.migration import JobPhase, Outcome
from vmckpt.units import Seconds

_FRESH = Seconds(30.0)
"""So long what preflight has seen is taken for true; libvirt looks at most of it again."""


async def plan(
    setting: Setting, request: MigrateRequest, caller: Caller, *,
    open_: Remotes | None = None, links: Links | None = None,
) -> Plan:  # fmt: skip
    """Everything that is decided before a start, with a forecast for every mode; changes nothing.

    `open_`: as in `migrate`; `links`: what several plans are to measure only once.

    Raises Cancelled if it was stopped.
    """
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        logins(here, there, open_) as remotes,
    ):
        move = _Move(setting, request, caller, (here, there), remotes)
        return await move.plan(every_mode=True, links=links)


async def migrate(
    setting: Setting, request: MigrateRequest, caller: Caller, open_: Remotes | None = None
) -> MigrationReport:
    """Migrate a guest, or with `dry_run` only say whether it could be.

    `open_`: logins at both hosts that nobody else uses meanwhile; else they are made.

    Setting `caller.stop` cancels: the job is aborted and the guest seen running on the source. The
    report says how it ended; errors are raised only for what kept it from beginning. Cancelled is
    raised when it was stopped before anything was changed.
    """
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        logins(here, there, open_) as remotes,
    ):
        move = _Move(setting, request, caller, (here, there), remotes)
        if request.dry_run:
            return move.not_begun(await move.plan())
        # The database library takes half a second to load: that long preflight takes, too.
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
        self._stop, self._turn = caller.stop, caller.turn
        self._recorder: Recorder | None = None
        self._tracer = Tracer(request.trace) if request.trace is not None else None
        self._early: list[Event] = []

    def _emit(self, event: Event) -> None:
        """To the listener and to the journal, which may open a moment later."""
        if self._recorder is not None:
            self._recorder.take(event)
        else:
            self._early.append(event)
        if self._tracer is not None:
            self._tracer.take(event)
        self._listener(event)

    def close(self) -> None:
        """Nothing more is to be told."""
        if self._tracer is not None:
            self._tracer.close()

    def _ahead(self, every_mode: bool, links: Links | None) -> planning.Ahead | None:
        """How to look ahead; a dry run only checks."""
        if self._request.dry_run and not every_mode:
            return None
        setting = self._setting

        async def past() -> Sequence[PastMove]:
            names = setting.source.name, setting.target.name
            return await asyncio.to_thread(jobs.past_moves, *names)

        request = self._request
        return planning.Ahead(
            past=past, probe=request.probe, every_mode=every_mode,
            closed_too=request.closed_too, links=links,
        )  # fmt: skip

    async def plan(self, *, every_mode: bool = False, links: Links | None = None) -> Plan:
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
                ahead=self._ahead(every_mode, links),
            ),
            self._stop,
        )
        self._emit(Checked(findings=made.findings))
        return made

    async def run(self, opening: "asyncio.Task[Recorder]") -> MigrationReport:
        """Plan and move, again after a failure if the policy says so."""
        try:
            plan = await self.plan()
        except BaseException as exc:
            (await opening).finish(_how(exc), _said(exc))
            raise
        recorder = self._recorder = await opening
        for event in self._early:
            recorder.take(event)
        desk_ = JournalDesk(recorder)
        try:
            plan = await self._in_turn(plan, recorder, desk_)
            around = self._around(desk_)
            return await Attempts(around, recorder, self.plan).run(self.not_begun(plan), plan)
        except BaseException as exc:
            # What is open, recovery undoes or finishes; only then it has ended.
            if not desk_.busy:
                recorder.finish(_how(exc), _said(exc))
            raise

    async def _in_turn(self, plan: Plan, recorder: Recorder, desk_: JournalDesk) -> Plan:
        """Wait for its turn; what was looked at long before that is looked at again."""
        guest = plan.facts.guest
        if self._turn is None or plan.blocked or guest is None:
            return plan
        looked = asyncio.get_running_loop().time()
        recorder.update(state="waiting", guest=guest.name)
        await served(self._turn(), self._stop, desk_)
        if asyncio.get_running_loop().time() - looked >= _FRESH:
            plan = await served(self.plan(), self._stop, desk_)
        recorder.update(state="running")
        return plan

    def _around(self, desk_: JournalDesk) -> Around:
        return Around(
            setting=self._setting,
            here=self._here,
            there=self._there,
            remotes=self._remotes,
            desk=desk_,
            tracer=self._tracer,
            emit=self._emit,
            stop=self._stop,
            observe=self._request.observe,
        )

    def not_begun(self, plan: Plan) -> MigrationReport:
        """The report of a plan that was not carried out."""
        return reporting.not_begun(plan, self._setting, self._request.guest)


def _asked(request: MigrateRequest) -> dict[str, Any]:
    """What of the request whoever goes on with it must know."""
    asked = {"observe": request.observe, "wishes": request.wishes.as_json()}
    return asked if request.part_of is None else {**asked, "part_of": request.part_of}


def _how(exc: BaseException) -> Outcome:
    """How an operation ended that raised this before libvirt had the order."""
    if isinstance(exc, Cancelled):
        return Outcome.CANCELLED
    refused = isinstance(exc, GuestBusy | BadInput)
    return Outcome.BLOCKED if refused else Outcome.FAILED


def _said(exc: BaseException) -> dict[str, Any]:
    said = {"error": str(exc) or type(exc).__name__}
    return {**said, "dismissed": True} if isinstance(exc, Dismissed) else said
