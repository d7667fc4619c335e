"""One attempt to carry out a plan: journal, images on the target, engine, cleanup."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vmckpt.errors import LeaseLost, RemoteError, VmckptError
from vmckpt.hypervisor import domains, qmp
from vmckpt.hypervisor.backup import Backups
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.migration import LibvirtMigrationDriver
from vmckpt.journal.recorder import JournalStepLog
from vmckpt.journal.records import StepState
from vmckpt.migration import report_builder, request, trace
from vmckpt.migration.cancellable import with_requests_answered
from vmckpt.migration.plan import planner, storage_cleanup, storage_copy
from vmckpt.migration.plan.host_facts import Remotes
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.plan.storage_cleanup import Tidied
from vmckpt.migration.recovery.decide import STAYS
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import Setting
from vmckpt.migration.run.engine import Ending, Migration
from vmckpt.migration.trace import Tracer
from vmckpt.model.disk import Checkpoint, Made
from vmckpt.model.events import Emit
from vmckpt.model.migration import MigrationDriver, MoveOrder, Outcome
from vmckpt.policy import loader
from vmckpt.remote import images, ssh
from vmckpt.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationContext:
    """State that all attempts of one command share."""

    setting: Setting
    here: Hypervisor
    there: Hypervisor
    remotes: Remotes | None
    step_log: JournalStepLog
    tracer: Tracer | None
    emit: Emit
    stop: asyncio.Event
    observe: bool


async def run(plan: Plan, context: MigrationContext) -> MigrationReport:
    """Carry out a plan that is not blocked. Returns the report of the attempt.

    Raises Cancelled if the operator stops the migration while images are created; HypervisorError
    if the guest's definition or QEMU's limits cannot be read or set; JournalError if a step could
    not be recorded; LeaseLost if another controller has taken over.
    """
    return await _Attempt(plan, context).run()


class _Attempt:
    def __init__(self, plan: Plan, context: MigrationContext) -> None:
        assert plan.policy is not None
        assert plan.facts.guest is not None
        self._plan, self._context = plan, context
        self._policy, self._guest = plan.policy, plan.facts.guest
        self._target_knew = True
        self._old: dict[str, str] = {}
        self._migrations = migration_driver(
            (context.here, context.there),
            context.remotes,
            self._guest.name,
            self._guest.uuid,
            context.step_log.check,
        )
        self._engine = Migration(
            self._migrations,
            request.terms(plan.policy, plan.mode, self._guest, plan.copies.size),
            context.emit,
            context.stop,
            step_log=context.step_log,
            curve=plan.curve,
            observe=context.observe,
        )

    async def run(self) -> MigrationReport:
        context = self._context
        not_begun = report_builder.not_begun(self._plan, context.setting, self._guest.name)
        order = await planner.order(self._plan, context.here)
        try:
            made = await with_requests_answered(self._make_images(), context.stop, context.step_log)
        except RemoteError as exc:
            maybe = tuple(
                f"{copy.path} on {context.setting.target.name} may have been created for this"
                " migration, and may still be there"
                for copy in self._plan.copies.copies
            )
            warned = (*not_begun.warnings, *maybe)
            return replace(not_begun, outcome=Outcome.FAILED, error=str(exc), warnings=warned)
        ending: Ending | None = None
        try:
            await self._intend(order)
            self._begin_trace()
            ending = await self._engine.run(order)
        finally:
            tidied = await self._tidy(made, ending)
            tidied = replace(tidied, troubles=tidied.troubles + await self._forget(ending))
            if ending is None and not self._engine.ordered and not tidied.troubles:
                await context.step_log.settle(StepState.UNDONE)
            if context.tracer is not None:
                context.tracer.end(ending.outcome if ending is not None else Outcome.UNKNOWN)
        line = self._plan.facts.checkpoints
        if line and ending.outcome is Outcome.COMPLETED:
            lost = await keep_checkpoints(context.there, self._guest.uuid, line)
            tidied = replace(tidied, troubles=tidied.troubles + lost)
        seen = await observed(
            context, self._guest.name, ending.outcome, ending.began, ending.elapsed
        )
        return report_builder.carried_out(not_begun, self._plan, ending, seen, tidied)

    async def _intend(self, order: MoveOrder) -> None:
        """Record the order, and the limits to restore, before libvirt receives the order."""
        usual = await self._migrations.max_downtime()
        limits = {"max_downtime_ms": round(usual * 1000), "throttle": bool(order.auto_converge)}
        await self._context.step_log.intend(Step.LIMITS, limits)
        # A definition found later is a leftover of this move only if the target had none before.
        there = await domains.presence(self._context.there, self._guest.uuid)
        self._target_knew = not there.reachable or there.state is not None
        move = {
            "order": order.as_json(),
            "target_knew": self._target_knew,
            "copied": self._plan.copies.size,
            # Recovery uses this text: the policy's file may have changed or moved by then.
            "policy": loader.text_of(self._policy),
        }
        await self._context.step_log.intend(Step.MOVE, move)

    def _begin_trace(self) -> None:
        if self._context.tracer is None:
            return
        header = trace.Header(
            guest=self._guest.name,
            memory=self._guest.memory,
            policy=self._policy.name,
            mode=self._plan.mode,
            post_copy=self._plan.mode.may_switch_early,
            curve=self._plan.curve,
        )
        self._context.tracer.begin(header, Seconds(asyncio.get_running_loop().time()))

    async def _make_images(self) -> Made | None:
        copies, remotes = self._plan.copies, self._context.remotes
        if not copies.copies or remotes is None:
            return None
        suffix = storage_copy.new_suffix()
        self._old = await storage_cleanup.marks(remotes, copies, runs=True, nvram=self._guest.nvram)
        meant = {
            "host": remotes[1].host.name,
            "paths": [copy.path for copy in copies.copies],
            "suffix": suffix,
            **storage_cleanup.meant(copies),
        }
        await self._context.step_log.intend(Step.IMAGES, meant)
        made = await storage_copy.prepare(remotes[1], copies, suffix)
        try:
            # The step stays open until the outcome is known: the images may have to be removed.
            await self._context.step_log.note(Step.IMAGES, {"marks": dict(made.marks)})
            await images.publish(remotes[1], made)
        except LeaseLost:
            raise
        except BaseException:
            await asyncio.shield(storage_copy.remove(remotes[1], made))
            raise
        return made

    async def _tidy(self, made: Made | None, ending: Ending | None) -> Tidied:
        """Finish the disk copies if the guest has arrived; remove the new images if it stays.

        If this is unknown, keep all images. Returns which of the source's images were removed; each
        failure, and each new image that is kept, is a line in the result.
        """
        remotes = self._context.remotes
        if made is None or remotes is None:
            return Tidied()
        try:
            self._context.step_log.check()
            if ending is not None and ending.outcome is Outcome.COMPLETED:
                copies, check = self._plan.copies, self._context.step_log.check
                return await storage_cleanup.finish(
                    copies, self._old, self._context.here, remotes, check
                )
            if not self._engine.ordered or (ending is not None and ending.outcome in STAYS):
                return Tidied(troubles=await storage_copy.remove(remotes[1], made))
        except VmckptError as exc:
            return Tidied(troubles=(f"{exc}",))
        lines = (
            f"{path} on {made.host}, an image made for this migration, is kept, because the guest"
            " may need it"
            for path in made.marks
        )
        return Tidied(troubles=tuple(lines))

    async def _forget(self, ending: Ending | None) -> tuple[str, ...]:
        """Undefine the guest on the target if it stays on the source and this move defined it.

        Returns one line if this fails, otherwise none.
        """
        if ending is None or ending.outcome not in STAYS or self._target_knew:
            return ()
        try:
            there = await domains.presence(self._context.there, self._guest.uuid)
            if there.state is not None:
                await self._migrations.undefine_on_target()
        except VmckptError as exc:
            return (f"{self._guest.name} may still be defined on the target: {exc}",)
        return ()


async def keep_checkpoints(
    target: Hypervisor, uuid: str, line: Sequence[Checkpoint]
) -> tuple[str, ...]:
    """Define checkpoints on the target after the guest has arrived.

    A migration transfers the bitmaps on shared disks, but not libvirt's checkpoints. `line`: the
    checkpoints, parents first. Returns a line for each checkpoint that is lost.
    """
    try:
        lost = await qmp.call_on_domain(
            target, uuid, "redefining checkpoints",
            lambda guest: Backups(guest).redefine(line), changes=True,
        )  # fmt: skip
    except VmckptError as exc:
        lost, why = tuple(one.name for one in line), exc.message
    else:
        why = "a disk has no bitmap for it"
    return tuple(
        f"checkpoint {name} was not defined on {target.host.name}: {why}; the next backup must be a"
        " full backup"
        for name in lost
    )


async def observed(
    context: MigrationContext, guest: str, outcome: Outcome, began: Seconds, elapsed: Seconds
) -> Seconds | None:
    """Return the guest's blackout, in seconds, as measured from outside.

    `guest`: the guest's name; `began`: when the migration began, on the monotonic clock; `elapsed`:
    how long it took. None if the blackout was not measured, or if the migration did not complete.
    """
    outside = context.setting.outside
    if outside is None or outcome is not Outcome.COMPLETED:
        return None
    return await outside.blackout(guest, began, Seconds(began + elapsed))


def migration_driver(
    hosts: tuple[Hypervisor, Hypervisor],
    remotes: Remotes | None,
    guest: str,
    uuid: str,
    check: Callable[[], None],
) -> MigrationDriver:
    """Return a driver that migrates the guest and can free the target's end of a broken stream.

    `hosts`: source and target. Without `remotes`, the target's end cannot be freed. `check` raises
    LeaseLost if another controller has taken over, and HypervisorError while this is unknown.
    `check` is called in the host's thread immediately before each call that makes a change.
    """

    async def free_target() -> None:
        check()
        if remotes is not None:
            await ssh.drop(remotes[1], guest)

    for hypervisor in hosts:
        hypervisor.check_lease = check
    return LibvirtMigrationDriver(*hosts, uuid, free_target=free_target)
