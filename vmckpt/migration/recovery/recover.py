"""Recover a migration whose controller is gone: finish or undo each of its steps.

`recovery.decide` decides what to do.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmckpt.errors import BadInput, HypervisorError, PolicyError, RemoteError
from vmckpt.hypervisor import domains, migration_leftovers
from vmckpt.hypervisor import same_host as same_hosts
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import JournalStepLog, OrphanedJob, Recorder
from vmckpt.journal.records import Operation, StepState, StoredStep
from vmckpt.migration import attempt, request
from vmckpt.migration import report as reports
from vmckpt.migration.plan import storage_cleanup, storage_copy
from vmckpt.migration.plan.host_facts import Remotes, logins
from vmckpt.migration.recovery import decide as recovery_decide
from vmckpt.migration.recovery.decide import RecoveryAction, RecoveryDecision
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import PolicyOverrides, Setting
from vmckpt.migration.run.actuator import Actuator
from vmckpt.migration.run.decide import RunTerms
from vmckpt.migration.run.engine import Ending, Migration
from vmckpt.migration.service import OPEN
from vmckpt.model import same_host
from vmckpt.model.events import Caller, Decided, Event
from vmckpt.model.guest import Presence
from vmckpt.model.host import Host
from vmckpt.model.migration import Decision, Driver, Mode, MoveOrder, Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy import parse, select
from vmckpt.policy.model import Policy
from vmckpt.remote import probe
from vmckpt.units import Bytes, Seconds


async def source_never_completed(
    source: Hypervisor, uuid: str, remotes: Remotes | None, *, since: float
) -> bool:
    """Return whether QEMU on the source reports that it never sent the complete guest.

    The guest must be running on the source; the migration began at `since` (Unix time). An
    incomplete copy cannot run on any host. Returns False if this is unknown.

    If the source booted after `since`, autostart may have started another QEMU process of the
    guest. The statistics of that process do not belong to this migration, so they are not used.
    """
    if remotes is None:
        return False
    try:
        up = await probe.uptime(remotes[0])
    except RemoteError:
        return False
    return up > time.time() - since and await migration_leftovers.source_never_completed(
        source, uuid
    )


# Hosts that have just restarted may briefly report contradictory states.
PATIENCE = Seconds(10.0)
_AGAIN = Seconds(0.5)
WAITS = (RecoveryAction.ADOPT, RecoveryAction.RESUME)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSteps:
    """The journal's record of an orphaned migration."""

    operation: Operation
    steps: tuple[StoredStep, ...]
    """Steps that are still in state "intended": neither finished nor undone."""

    @property
    def order(self) -> MoveOrder | None:
        """The order that libvirt may have received; None if the journal has no order.

        Raises BadInput if the order in the journal is invalid.
        """
        move, other = self.open(Step.MOVE), self.open(Step.DRIVER)
        stored: Any = self.operation.detail.get("order")  # where schema 1 stores the order
        if move is not None:
            stored = move.intent.get("order")
        if stored is None:
            return None
        try:
            order = MoveOrder.from_json(stored)
            return order if other is None else replace(order, driver=Driver.CLIENT)
        except (KeyError, TypeError, ValueError) as exc:
            raise BadInput(
                f"{self.operation.id}: the order in the journal is invalid ({exc})",
                hint="run vmckpt guests to see where the guest is running",
            ) from exc

    def open(self, step: Step) -> StoredStep | None:
        return next((one for one in reversed(self.steps) if one.name == step), None)


def open_steps(operation: Operation, steps: Sequence[StoredStep]) -> OpenSteps:
    """Return the open steps of an operation."""
    return OpenSteps(
        operation=operation, steps=tuple(one for one in steps if one.state is StepState.INTENDED)
    )


class Recovery:
    """Recovers one migration. An async context manager that opens connections to both hosts."""

    def __init__(self, setting: Setting, left_: OpenSteps) -> None:
        self.left = left_
        self.here = Hypervisor(setting.source)
        self.there = Hypervisor(setting.target)
        self.remotes: Remotes | None = None
        """ssh logins to both hosts; None before entry, or if a host has no ssh address."""
        self.ending: Ending | None = None
        """How the migration ended after it was adopted; None if it was not adopted."""
        self._setting = setting
        self._on_both = False
        """Whether both hosts reported a process of the guest when they were last queried."""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Recovery":
        await self._stack.enter_async_context(self.here)
        await self._stack.enter_async_context(self.there)
        self.remotes = await self._stack.enter_async_context(logins(self.here, self.there))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def uuid(self) -> str:
        return self.left.operation.guest_uuid or ""

    @property
    def policy(self) -> Policy:
        """The policy under which the migration began, with overrides applied.

        The default policy if the policy is unknown. Invalid overrides are ignored.
        """
        operation, shelf = self.left.operation, self._setting.policies
        known = {policy.name: policy for policy in shelf}
        policy = known.get(operation.policy or "") or select.by_name(shelf, select.DEFAULT)
        move = self.left.open(Step.MOVE)
        try:
            if move is not None and (text := move.intent.get("policy")):
                policy = parse.parse(str(text), Path(operation.policy or "policy"))
            return request.apply_overrides(
                policy, PolicyOverrides.from_json(operation.detail.get("wishes") or {})
            )
        except (PolicyError, ValueError):
            return policy

    @property
    def mode(self) -> Mode:
        modes = {str(mode): mode for mode in Mode}
        return modes.get(self.left.operation.mode or "", Mode.PRECOPY)

    async def presences(self) -> tuple[Presence, Presence]:
        here, there = await asyncio.gather(
            domains.presence(self.here, self.uuid), domains.presence(self.there, self.uuid)
        )
        return here, there

    async def _may_have_run(self, source: Presence, target: Presence) -> bool:
        """Return whether the guest may have run on a target that has no process of it now.

        This is possible if the target received the entire guest and libvirt defined the guest
        there, which happens immediately before the CPUs start. A transient guest is never defined,
        so for a transient guest a complete transfer is enough.
        """
        order = self.left.order
        if order is None or not source.reachable or source.runs or source.state is None:
            return False
        move = self.left.open(Step.MOVE)
        knew = move is None or bool(move.intent.get("target_knew"))
        if order.persistent and not knew and target.state is None:
            return False
        return await migration_leftovers.handed_over(self.here, self.uuid)

    async def _elsewhere(self, source: Presence, target: Presence) -> tuple[str, ...]:
        """Return the other hosts that have a process of the guest.

        Hosts that do not answer are left out, and so are other names of the job's hosts. The guest
        can be on another host only if an operator moved it by hand, because this job's lock
        prevents a move by another vmckpt process. Raises InventoryError if it is unknown whether
        a host that has the guest is one of the job's hosts.
        """

        async def has(host: Host) -> bool:
            async with Hypervisor(host) as hypervisor:
                found = await domains.presence(hypervisor, self.uuid)
                if found.state is None or not found.state.is_active:
                    return False
                ends = zip((self.here, self.there), (source, target), strict=True)
                same = [
                    same for end, seen in ends if seen.is_active
                    for same in await same_hosts.among((end, hypervisor))
                ]  # fmt: skip
            same_host.require_distinct([one for one in same if one.one is None])
            return not any(one.one for one in same)

        others = self._setting.others
        answers = await asyncio.gather(*(has(host) for host in others))
        return tuple(host.name for host, here in zip(others, answers, strict=True) if here)

    def report(self, ending: Ending) -> MigrationReport:
        """Return the report of a migration that another controller started."""
        return MigrationReport(
            guest=self.left.operation.guest,
            source=self._setting.source.name,
            target=self._setting.target.name,
            outcome=ending.outcome,
            driver=ending.driver,
            began=ending.began,
            elapsed=ending.elapsed,
            totals=ending.totals,
            observed_downtime=None,
            samples=ending.samples,
            decisions=ending.decisions,
            warnings=ending.warnings,
            error=ending.error,
            policy=self.policy.name,
            mode=self.mode,
            limit=self.policy.limits.bandwidth,
            job=self.left.operation.id,
        )

    async def decide(self) -> RecoveryDecision:
        """Determine the state of the migration and what to do about it.

        An outcome counts only if two queries in a row show it. Inconsistent answers, and answers
        that also occur briefly during a transition, count only once they have stayed the same for
        `PATIENCE`. Raises InventoryError if two names are, or may be, one host; BadInput if the
        order in the journal is invalid.
        """
        if not self.uuid or (not self.left.steps and self.left.order is None):
            return recovery_decide.NEVER  # nothing was done to any host yet
        verdict = await self._steady()
        if self._on_both:
            # Otherwise, the only copy of the guest could be destroyed as the other copy.
            same_host.require_distinct(await same_hosts.among((self.here, self.there)))
        return verdict

    async def _steady(self) -> RecoveryDecision:
        """Query both hosts until the decision stays the same. Returns `ODD` if it does not."""
        began = since = _now()
        last: RecoveryDecision | None = None
        while True:
            verdict, silent = await self._look()
            if verdict != last:
                last, since = verdict, _now()
            wait = _AGAIN
            if verdict.if_it_stays or not verdict.known:
                wait = PATIENCE
            moves = verdict.outcome is None and verdict.known
            if (silent and not verdict.known) or moves or _now() - since >= wait:
                return verdict
            if _now() - began > 3 * PATIENCE:
                return recovery_decide.ODD
            await asyncio.sleep(_AGAIN)

    async def _look(self) -> tuple[RecoveryDecision, bool]:
        """Query both hosts once. Returns the decision, and whether either host did not answer."""
        ordered = self.left.order is not None
        source, target = await self.presences()
        self._on_both = source.is_active and target.is_active
        began = self.left.operation.began_at
        asks = source.runs and not (source.migrating or target.reachable)
        verdict = recovery_decide.decide(
            source,
            target,
            ordered=ordered,
            paused_by_us=self.left.open(Step.PAUSE) is not None,
            elsewhere=await self._elsewhere(source, target) if ordered else (),
            may_have_run=await self._may_have_run(source, target),
            sent_all=not asks
            or not await source_never_completed(self.here, self.uuid, self.remotes, since=began),
        )
        return verdict, not (source.reachable and target.reachable)

    async def carry_out(
        self, verdict: RecoveryDecision, recorder: Recorder, caller: Caller
    ) -> Settled:
        """Carry out the verdict as this operation's controller.

        Returns what was done. Raises LeaseLost if another controller takes over meanwhile. After
        HypervisorError, RemoteError or JournalError, the operation must be recovered again.
        """
        return await _Doing(self, verdict, recorder, caller).run()


def _now() -> Seconds:
    return Seconds(asyncio.get_running_loop().time())


def settled(verdict: RecoveryDecision) -> Settled:
    """Return the result that carrying out this verdict would have."""
    return Settled(
        truth=verdict.truth,
        outcome=verdict.outcome,
        did=tuple(str(act) for act in verdict.acts),
        settle=verdict.settle,
        goes_on=any(act in verdict.acts for act in WAITS),
    )


class _Doing:
    """The execution of one verdict."""

    def __init__(
        self, recovery: Recovery, verdict: RecoveryDecision, recorder: Recorder, caller: Caller
    ) -> None:
        self._did: list[str] = []
        self._recovery = recovery
        self._verdict = verdict
        self._recorder = recorder
        self._caller = caller
        self._warnings: list[str] = []
        self._left = recovery.left
        self._step_log = JournalStepLog(recorder, {one.seq: one.name for one in self._left.steps})
        self._migrations = attempt.migration_driver(
            (recovery.here, recovery.there),
            recovery.remotes,
            self._left.operation.guest,
            recovery.uuid,
            self._step_log.check,
        )

    async def run(self) -> Settled:
        verdict, outcome, ending = self._verdict, self._verdict.outcome, None
        acts = verdict.acts
        if any(act in WAITS for act in acts):
            self._did += [str(act) for act in acts]
            ending = self._recovery.ending = await self._go_on(RecoveryAction.RESUME in acts)
            outcome, acts = ending.outcome, recovery_decide.after(ending.outcome)
            self._warnings += ending.warnings
        self._name_images(outcome)
        truth = verdict.truth if ending is None else f"the migration's outcome is {outcome}"
        for act in acts:
            self._tell(act, truth)
            await self._do(act)
            self._did.append(str(act))
        told = Settled(
            truth=truth, outcome=outcome, did=tuple(self._did), warnings=tuple(self._warnings)
        )
        if outcome is None or outcome in OPEN:
            self._recorder.update(phase=str(outcome or Outcome.UNKNOWN))
            resumes = outcome is Outcome.POST_COPY_PAUSED
            job = self._left.operation.id
            again = f"run vmckpt resume {job}" if resumes else "run vmckpt recover"
            return replace(
                told, outcome=None, settle=f"check both hosts and their network, then {again}"
            )
        said = {} if ending is None else reports.as_json(self._recovery.report(ending))
        self._recorder.finish(outcome, {**said, "recovered": told.as_json()})
        return told

    def _name_images(self, outcome: Outcome | None) -> None:
        """Warn about the new images if the guest is not running on either host.

        The operator must then choose between the images on the two hosts.
        """
        step = self._left.open(Step.IMAGES)
        if step is not None and outcome in (Outcome.SHUT_OFF, Outcome.LOST):
            host, paths = step.intent.get("host"), step.intent.get("paths", [])
            self._warnings += [
                f"{path} on {host}, an image made for this migration, is kept, because it may"
                " contain the guest's latest data"
                for path in paths
            ]

    def _tell(self, act: RecoveryAction, truth: str) -> None:
        now = Seconds(asyncio.get_running_loop().time())
        decision = Decision(at=now, action=str(act), reason=truth, rule="recover")
        self._emit(Decided(decision=decision))

    def _emit(self, event: Event) -> None:
        self._recorder.take(event)
        self._caller.emit(event)

    async def _go_on(self, in_two_parts: bool) -> Ending:
        order = self._left.order
        assert order is not None
        engine = Migration(
            self._migrations,
            await self._terms(in_two_parts=in_two_parts),
            self._emit,
            self._caller.stop,
            step_log=self._step_log,
            observe=bool(self._left.operation.detail.get("observe")),
        )
        return await (engine.resume(order) if in_two_parts else engine.adopt(order))

    async def _terms(self, *, in_two_parts: bool) -> RunTerms:
        """Return the terms that the first controller used; the time limit starts again.

        If the source no longer has the guest, or the mode is post-copy, only the time to recover
        applies. `in_two_parts`: a post-copy has begun.
        """
        policy, mode = self._recovery.policy, self._recovery.mode
        if in_two_parts:
            policy = request.answered(policy)
        guest = await domains.find_guest(self._recovery.here, self._recovery.uuid)
        if guest is None or mode is Mode.POSTCOPY:
            return request.resumed(policy)
        move = self._left.open(Step.MOVE)
        copied = Bytes(int((move.intent.get("copied") if move is not None else None) or 0))
        return request.terms(policy, mode, guest, copied)

    async def _do(self, act: RecoveryAction) -> None:
        here, there, uuid = self._recovery.here, self._recovery.there, self._recovery.uuid
        self._step_log.check()
        match act:
            case RecoveryAction.END_TARGET:
                await migration_leftovers.end_arriving(there, uuid)
            case RecoveryAction.END_SOURCE:
                await migration_leftovers.end_leaving(here, uuid)
            case RecoveryAction.START_SOURCE:
                await migration_leftovers.start_leaving(here, uuid)
            case RecoveryAction.UNDO:
                await self._undo()
            case RecoveryAction.FINISH:
                await self._finish()
            case RecoveryAction.ADOPT | RecoveryAction.RESUME:
                raise AssertionError("the engine carries out these actions")

    async def _undo(self) -> None:
        """Restore QEMU's limits, remove new images, and undefine a guest that the move defined."""
        source, target = await self._recovery.presences()
        limits = self._left.open(Step.LIMITS)
        if limits is not None and source.state is not None and source.state.is_active:
            usual = Seconds(float(limits.intent["max_downtime_ms"]) / 1000)
            await self._migrations.set_max_downtime(usual)
            if limits.intent.get("throttle") or self._left.open(Step.THROTTLE):
                await self._migrations.throttle(None)
            if self._left.open(Step.BANDWIDTH):
                await self._migrations.set_bandwidth(None, post_copy=False)
        self._warnings += await storage_copy.unmade(
            self._recovery.remotes, self._left.open(Step.IMAGES)
        )
        move = self._left.open(Step.MOVE)
        if move is None or move.intent.get("target_knew", True):
            return
        try:
            if not target.reachable or target.state is not None:
                await self._migrations.undefine_on_target()
        except HypervisorError as exc:
            self._warnings.append(f"the guest may still be defined on the target: {exc}")

    async def _finish(self) -> None:
        """Complete a migration whose guest has arrived: autostart, old definition, new images."""
        order = self._left.order
        if order is not None:
            await Actuator(self._migrations).arrived(order, self._warnings.append)
        if step := self._left.open(Step.IMAGES):
            source, remotes = self._recovery.here.host.name, self._recovery.remotes
            self._warnings += await storage_cleanup.after_crash(step.intent, source, remotes)


def setting_of(operation: Operation, inventory: Inventory, policies: Sequence[Policy]) -> Setting:
    """Return the hosts and policies of an operation. Raises InventoryError."""
    source = inventory.host(operation.source or "")
    target = inventory.host(operation.target or "")
    others = [one for one in inventory.hosts.values() if one not in (source, target)]
    return Setting(source=source, target=target, policies=policies, outside=None, others=others)


async def settle(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover a migration. See `vmckpt.recovery.Handler`. Raises InventoryError."""
    setting = setting_of(case.operation, case.inventory, policies)
    async with Recovery(setting, open_steps(case.operation, case.steps)) as recovery:
        verdict = await recovery.decide()
        told = settled(verdict)
        if case.recorder is None or not verdict.known or (told.goes_on and not case.adopt):
            return told
        return await recovery.carry_out(verdict, case.recorder, case.caller)


async def resume(
    setting: Setting, left: OpenSteps, recorder: Recorder, caller: Caller
) -> MigrationReport:
    """Take over as the job's controller and resume its post-copy. Returns the report.

    Raises BadInput if there is nothing to resume: the journal has no order, or the guest is not in
    post-copy. Also raises the errors of `Recovery.decide` and `Recovery.carry_out`.
    """
    async with Recovery(setting, left) as recovery:
        verdict = await recovery.decide()
        if RecoveryAction.RESUME not in verdict.acts:
            raise BadInput(
                f"{left.operation.guest} has no post-copy migration to resume: {verdict.truth}",
                hint=verdict.settle or "run vmckpt recover",
            )
        await recovery.carry_out(verdict, recorder, caller)
        assert recovery.ending is not None
        return recovery.report(recovery.ending)
