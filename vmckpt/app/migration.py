"""Migrations: begin, plan, control, resume, recover and replay them."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt import inventory as inventories
from vmckpt import recovery as recovering
from vmckpt.app import controller, fleet
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, HostUnreachable, JournalError, VmckptError, at_host
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity, jobs, recorder
from vmckpt.journal.jobs import Answer
from vmckpt.journal.records import FORGOTTEN, MIGRATE, WHOLE_HOST, Operation, RequestKind
from vmckpt.migration import service
from vmckpt.migration.cancellable import cancellable
from vmckpt.migration.plan import locate
from vmckpt.migration.plan.locate import GuestAt
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.recovery import direct_control
from vmckpt.migration.recovery import recover as migrate_recover
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import MigrateRequest, Setting
from vmckpt.model.host import Host
from vmckpt.model.migration import Mode, Outcome, OutsideView
from vmckpt.model.recovery import Settled
from vmckpt.policy import loader, select
from vmckpt.recovery import Recovered
from vmckpt.util import plugins

if TYPE_CHECKING:
    from vmckpt.migration.replay import ReplayReport


async def migrate(controller: Controller, request: MigrateRequest) -> MigrationReport:
    """See migration.service.migrate; finds the guest's host if the request does not name it.

    Raises ReadOnly, as everything here that acts, if only looking is allowed.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if not request.dry_run:
        inventory.may_act()
    setting = await _put_in_order_and_find(controller, request)
    report = await service.migrate(setting, request, caller)
    if report.outcome is not Outcome.UNKNOWN or report.job is None:
        return report
    # Recovery may know what to do where an engine may only wait.
    try:
        found = await recovering.recover_job(inventory, policies, caller, report.job)
    except JournalError as exc:
        return replace(report, warnings=(*report.warnings, str(exc)))
    said = (f"it was not known at first; then: {found.truth}", *found.did, *found.warnings)
    outcome = found.outcome or report.outcome
    return replace(report, outcome=outcome, warnings=(*report.warnings, *said))


async def _put_in_order_and_find(controller: Controller, request: MigrateRequest) -> Setting:
    """What dead controllers left is put in order first; meanwhile the guest is looked for."""
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if request.dry_run:
        return await _setting(controller, request)
    await asyncio.to_thread(jobs.require_not_delegated, request.guest)
    first = asyncio.create_task(recovering.recover_before(inventory, policies, caller))
    try:
        setting = await _setting(controller, request)
    except VmckptError:
        if not await first:
            raise
        return await _setting(controller, request)
    if await first:
        return await _setting(controller, request)
    return setting


async def plan(controller: Controller, request: MigrateRequest) -> tuple[Plan, Host, Host]:
    """What a migration would be, by migration.service.plan; and its source and target."""
    setting = await _setting(controller, request)
    return await service.plan(setting, request, controller.caller), setting.source, setting.target


def _observer(control: Path) -> OutsideView | None:
    """What watches guests from outside, if a package that does is installed."""
    return next((made(control) for _, made in plugins.added("vmckpt.observers")), None)


async def _setting(controller: Controller, request: MigrateRequest) -> Setting:
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    target = inventory.host(request.to)
    source = inventory.host(request.from_) if request.from_ else None
    if source is None:
        finding = _find(inventory, request.guest, request.to)
        source = await cancellable(finding, caller.stop)
    watcher = _observer(inventory.observer) if inventory.observer else None
    return Setting(source=source, target=target, policies=policies, outside=watcher)


async def recover(controller: Controller, *, dry_run: bool) -> list[Recovered]:
    """Look at every operation that nobody attends, and finish or undo it.

    What still runs in libvirt is watched to its end; `caller.stop` ends the watching alone.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if not dry_run:
        inventory.may_act()
    return await recovering.recover_all(inventory, policies, caller, dry_run=dry_run)


def forget(inventory: Callable[[], Inventory], job: str) -> Recovered:
    """End an unattended job by the operator's word. No host is asked or touched.

    Raises BadInput, ReadOnly, and GuestLocked if somebody attends it.
    """
    _may_act(inventory)
    with jobs.open_journal() as journal:
        operation = journal.operation(job)
        journal.take_over(operation)
        journal.finish(operation.id, Outcome.UNKNOWN, {FORGOTTEN: controller_identity.asked_by()})
    ended = Settled(truth="it is over, by your word; no host was asked", outcome=Outcome.UNKNOWN)
    return Recovered(operation=operation, settled=ended)


def _may_act(inventory: Callable[[], Inventory]) -> None:
    """Raises ReadOnly; what needs no host is done without an inventory, too."""
    try:
        known = inventory()
    except BadInput:
        inventories.may_act()
    else:
        known.may_act()


def replay(
    path: Path, folder: Path | None, wanted: str | None, mode: Mode | None
) -> "ReplayReport":
    """What a policy (by name or file; None: the default) would have made of a recorded migration.
    `folder`: None: that beside the inventory, if there is one.

    Raises BadInput and PolicyError.
    """
    policy = loader.load_one(
        wanted or select.DEFAULT, loader.folder(folder, controller.inventory_path())
    )
    from vmckpt.migration import replay as migration_replay  # noqa: PLC0415 - one command needs it

    return migration_replay.replayed(path, replace(policy, mode=mode or policy.mode))


def of_whole_host(job: str) -> bool:
    """Whether a job is about a host and all its guests. Raises BadInput if there is none such."""
    with jobs.open_journal() as journal:
        return journal.operation(job, ended=True).kind in WHOLE_HOST


def go_on(inventory: Callable[[], Inventory], job: str) -> Answer:
    """Let a job of a whole host go on that was paused. Raises BadInput, ReadOnly, OrphanedJobs."""
    _may_act(inventory)
    with jobs.open_journal() as journal:
        return jobs.control(journal, job, RequestKind.GO_ON, {})


async def resume(controller: Controller, job: str) -> MigrationReport:
    """Go on with a broken post-copy whose controller has ended.

    Raises BadInput if there is nothing to resume, GuestLocked if somebody is at it.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    inventory.may_act()
    with jobs.open_journal() as journal:
        operation = journal.operation(job, ended=True)
        if not operation.active:
            raise BadInput(
                f"{operation.id} has ended: {operation.outcome}; there is nothing to resume",
                hint=f"vmckpt job {operation.id} tells how",
            )
        jobs.refuse_uncontrolled(operation)
        if operation.kind != MIGRATE:
            raise BadInput(
                f"{operation.id} is a {operation.kind} job: only a migration is resumed",
                hint="run vmckpt recover",
            )
        setting = migrate_recover.setting_of(operation, inventory, policies)
        with recorder.taken_over(journal, operation, caller.warn) as kept:
            left = migrate_recover.open_steps(operation, journal.steps(operation.id))
            return await migrate_recover.resume(setting, left, kept, caller)


def control(
    inventory: Callable[[], Inventory],
    job: str,
    kind: RequestKind,
    arguments: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Answer:
    """Ask a running job for something; without its controller libvirt is asked directly.

    Without an inventory that is left out.
    """
    _may_act(inventory)

    def direct(operation: Operation, kind: RequestKind, arguments: Mapping[str, Any]) -> Answer:
        try:
            hosts_ = inventory()
            # As its controller, for this one call: nobody else may act on the guest meanwhile.
            with recorder.taken_over(journal, operation, warn) as kept:
                return asyncio.run(direct_control.act(hosts_, operation, kind, arguments, kept))
        except (BadInput, HostUnreachable) as exc:
            raise jobs.unattended(operation, kind, arguments) from exc

    with jobs.open_journal() as journal:
        return jobs.control(journal, job, kind, arguments, direct)


async def _find(inventory: Inventory, name: str, to: str) -> Host:
    """The host that a guest is to be moved away from.

    Raises BadInput if no host knows it, HostUnreachable if one that may know it does not answer,
    OutcomeUnknown if it is active on two hosts.
    """
    found, errors = await fleet.guests(inventory)
    called = [
        GuestAt(host=host.name, uuid=guest.uuid, state=guest.state)
        for host, guest in found
        if name in (guest.name, guest.uuid)
    ]
    leaving = [host for host, guest in found if name in (guest.name, guest.uuid) and guest.leaves]
    if len(leaving) == 1:
        return leaving[0]  # preflight says what it is busy with
    states = locate.one_guest(name, called, to=to)
    holder = locate.holder(name, states, to=to)
    if holder is not None and (states[holder].is_active or not errors):
        return inventory.host(holder)
    if errors:
        silent = "; ".join(at_host(*one) for one in errors.items())
        raise HostUnreachable(
            f"no host that answers runs guest {name}; not asked: {silent}",
            host=next(iter(errors)),
            hint="mend the host, or name the source with --from",
        )
    raise fleet.no_guest(inventory, name, found)
