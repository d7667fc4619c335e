"""Carrying a plan out, again after a failure if the policy says so."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace

from vmckpt.errors import Cancelled, GuestBusy, HostUnreachable
from vmckpt.hypervisor import domains
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import StepState
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.migrate import attempt, report
from vmckpt.migrate.attempt import Around
from vmckpt.migrate.planning import Plan
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.waiting import served
from vmckpt.model.events import Decided
from vmckpt.model.guest import Guest
from vmckpt.model.migration import Decision, Mode, Outcome
from vmckpt.policy.model import OnFailure, Policy, Retries
from vmckpt.units import Seconds, show_seconds

OPEN = (Outcome.UNKNOWN, Outcome.POST_COPY_PAUSED)
"""Not the end: the guest stays the operation's until recovery finds out, or mends it."""


class Attempts:
    """All attempts of one command. `plan_again` looks at everything anew before another one."""

    def __init__(
        self,
        around: Around,
        recorder: Recorder,
        plan_again: Callable[[], Coroutine[object, object, Plan]],
    ) -> None:
        self._around = around
        self._recorder = recorder
        self._plan_again = plan_again

    async def run(self, begun: MigrationReport, plan: Plan) -> MigrationReport:
        """Until it is done, or no other attempt is due. `begun`: the plan's report.

        Raises GuestBusy, JournalError, LeaseLost.
        """
        begun = replace(begun, job=self._recorder.id)
        if plan.blocked or plan.policy is None:
            return self._ended(begun)
        told = await self._attempt(plan, 1)
        number = 1
        while again(told, plan.policy, number):
            if not await self._wait(told, plan.policy.retries, number):
                break
            desk = self._around.desk
            try:
                plan = await served(self._plan_again(), self._around.stop, desk)
            except Cancelled:
                break
            number += 1
            await desk.settle(StepState.UNDONE)
            if plan.blocked or plan.policy is None:
                why = "; ".join(f"{one.where}: {one.text}" for one in plan.blockers)
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
            # Only who moves a guest so pays for what it needs.
            from vmckpt.migrate import checkpointed  # noqa: PLC0415

            carry_out = checkpointed.run
        return replace(await carry_out(plan, self._around), job=recorder.id, attempts=number)

    async def _own(self, guest: Guest) -> None:
        """From here on nobody else may act on the guest. Raises GuestBusy.

        Before that it was looked at without a lease: another controller may have moved it.
        """
        wanted, fence = guest_resource(guest.uuid), self._recorder.fence
        if fence is not None and fence.resource != wanted:
            raise GuestBusy(
                f"another guest is called {guest.name} by now; nothing more was changed",
                mend="see vmckpt guests",
            )
        await asyncio.to_thread(self._recorder.acquire, wanted)
        seen = await domains.presence(self._around.here, guest.uuid)
        if not seen.reachable:
            source = self._around.setting.source.name
            raise HostUnreachable(f"{source} does not answer; nothing was changed", host=source)
        if not seen.runs or seen.migrating:
            raise GuestBusy(
                f"{guest.name} does not run undisturbed on {self._around.setting.source.name} any"
                " more; nothing was changed",
                mend="see vmckpt jobs and vmckpt guests, and try again",
            )

    async def _wait(self, told: MigrationReport, retries: Retries, number: int) -> bool:
        """Wait for the next attempt; False if it was stopped meanwhile."""
        wait = wait_before(retries, number)
        reason = f"{told.error or 'it failed'}; attempt {number + 1} in {show_seconds(wait)}"
        self._around.emit(Decided(decision=_decided("try again", reason)))
        self._recorder.update(state="waiting")
        try:
            await served(asyncio.sleep(wait), self._around.stop, self._around.desk)
        except Cancelled:
            return False
        self._recorder.update(state="running")
        return True


def again(told: MigrationReport, policy: Policy, number: int) -> bool:
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
