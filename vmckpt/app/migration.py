"""Start, plan, control, resume, recover and replay migrations."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt import recovery as recovering
from vmckpt.app import controller, fleet, permission
from vmckpt.app.controller import Controller
from vmckpt.errors import BadInput, HostUnreachable, JournalError, run_doctor, silent_hosts
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity, jobs, recorder
from vmckpt.journal.jobs import Answer
from vmckpt.journal.records import FORGOTTEN, MIGRATE, WHOLE_HOST, Operation, RequestKind
from vmckpt.journal.systemd_log import SystemdLog
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

_COMMANDS: Mapping[RequestKind, str] = {
    RequestKind.BANDWIDTH: "set", RequestKind.MAX_DOWNTIME: "set",
    RequestKind.POSTCOPY: "postcopy", RequestKind.CANCEL: "cancel", RequestKind.PAUSE: "pause",
    RequestKind.GO_ON: "resume",
}  # fmt: skip
"""The command that sends each request."""


async def migrate(controller: Controller, request: MigrateRequest) -> MigrationReport:
    """Migrate a guest; see migration.service.migrate.

    Finds the guest's host if the request does not name the host. Raises ReadOnly or
    NotPermitted if changes are not allowed, like every function in this module that makes changes.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if not request.dry_run:
        permission.require(inventory, "migrate", guest=request.guest)
    setting = await _put_in_order_and_find(controller, request)
    report = await service.migrate(setting, request, caller)
    if report.outcome is not Outcome.UNKNOWN or report.job is None:
        return report
    # Recovery may determine the outcome that the migration engine left unknown.
    try:
        found = await recovering.recover_job(inventory, policies, caller, report.job)
    except JournalError as exc:
        return replace(report, warnings=(*report.warnings, str(exc)))
    said = (
        f"the outcome was unknown; recovery: {found.truth}",
        *(f"done: {did}" for did in found.did),
        *found.warnings,
    )
    outcome = found.outcome or report.outcome
    return replace(report, outcome=outcome, warnings=(*report.warnings, *said))


async def _put_in_order_and_find(controller: Controller, request: MigrateRequest) -> Setting:
    """Recover the jobs of dead controllers, and find the guest at the same time.

    The guest is searched for again if recovery changed anything. A dry run recovers nothing.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if request.dry_run:
        return await _setting(controller, request)
    finding = asyncio.create_task(_setting(controller, request))
    try:
        await asyncio.to_thread(jobs.require_not_delegated, request.guest)
        changed = await recovering.recover_before(inventory, policies, caller)
    except BaseException:
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)
        raise
    if not changed:
        return await finding
    await asyncio.gather(finding, return_exceptions=True)
    return await _setting(controller, request)


async def plan(controller: Controller, request: MigrateRequest) -> tuple[Plan, Host, Host]:
    """Plan a migration; see migration.service.plan. Returns the plan, the source and the target.

    Raises the errors of migration.service.plan, and BadInput if the guest is not found.
    """
    setting = await _setting(controller, request)
    return await service.plan(setting, request, controller.caller), setting.source, setting.target


def _observer(control: Path) -> OutsideView | None:
    """Return the observer of guests that another installed package provides; None if there is none.

    `control`: path that the observer needs, from the inventory.
    """
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
    """Finish or undo every orphaned job, and check the jobs that are delegated to the agents.

    A migration that is still running in libvirt is monitored until it ends; `caller.stop` stops
    only the monitoring. `dry_run`: report without changing anything. Returns each job with its
    result. Raises ReadOnly, NotPermitted, JournalError.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    if not dry_run:
        permission.require(inventory, "recover")
    return await recovering.recover_all(inventory, policies, caller, dry_run=dry_run)


def forget(inventory: Callable[[], Inventory], job: str) -> Recovered:
    """Mark an orphaned job as ended, at the operator's request. No host is contacted or changed.

    `inventory`: loads the inventory, if there is one, to check the user's role. Raises BadInput,
    ReadOnly, JournalError, and GuestLocked if the job has a live controller.
    """
    permission.require_if_known(inventory, "recover")
    with jobs.open_journal() as journal:
        operation = journal.operation(job)
        journal.take_over(operation)
        journal.finish(operation.id, Outcome.UNKNOWN, {FORGOTTEN: controller_identity.asked_by()})
    SystemdLog(operation.id, operation).ended(Outcome.UNKNOWN, None)
    ended = Settled(truth="ended at your request; no host was contacted", outcome=Outcome.UNKNOWN)
    return Recovered(operation=operation, settled=ended)


def replay(
    path: Path, folder: Path | None, wanted: str | None, mode: Mode | None
) -> "ReplayReport":
    """Replay a recorded migration under another policy.

    `folder`: the directory of policies; None: the directory beside the inventory, if it exists.
    `wanted`: a policy's name or file; None: the default policy. `mode`: overrides the policy's
    mode. Raises BadInput and PolicyError.
    """
    policy = loader.load_one(
        wanted or select.DEFAULT, loader.folder(folder, controller.inventory_path())
    )
    from vmckpt.migration import replay as migration_replay  # noqa: PLC0415 - one command needs it

    return migration_replay.replayed(path, replace(policy, mode=mode or policy.mode))


def of_whole_host(job: str) -> bool:
    """Return whether a job is for all guests of a host.

    Raises BadInput if the job is unknown, and JournalError.
    """
    with jobs.open_journal() as journal:
        return journal.operation(job, ended=True).kind in WHOLE_HOST


def go_on(inventory: Callable[[], Inventory], job: str) -> Answer:
    """Continue a paused job that moves all guests of a host.

    Raises BadInput, ReadOnly, OrphanedJobs, JournalError, OutcomeUnknown.
    """
    permission.require_if_known(inventory, "resume")
    with jobs.open_journal() as journal:
        return jobs.control(journal, job, RequestKind.GO_ON, {})


async def resume(controller: Controller, job: str) -> MigrationReport:
    """Resume a broken post-copy migration whose controller is gone.

    Raises BadInput if there is nothing to resume, GuestLocked if the job has a live controller,
    JournalError, LeaseLost.
    """
    inventory, policies, caller = controller.inventory, controller.policies, controller.caller
    permission.require(inventory, "resume")
    with jobs.open_journal() as journal:
        operation = journal.operation(job, ended=True)
        if not operation.active:
            raise BadInput(
                f"{operation.id} has ended: {operation.outcome}; there is nothing to resume",
                hint=f"run vmckpt job {operation.id} for details",
            )
        jobs.refuse_uncontrolled(operation)
        if operation.kind != MIGRATE:
            raise BadInput(
                f"{operation.id} (kind: {operation.kind}) cannot be resumed; only migrations,"
                " evacuations, repopulations and balancing can",
                hint="wait until the job has ended, or run vmckpt recover",
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
    """Send a request to a running job, and return its answer.

    `job`: its ID, a prefix of the ID, or its guest; `arguments`: of the request, such as a limit;
    `warn` receives warnings. If the job's controller is gone, the request is sent to libvirt
    directly; this requires an inventory. Raises BadInput, ReadOnly, OrphanedJobs, JournalError,
    OutcomeUnknown.
    """
    permission.require_if_known(inventory, _COMMANDS[kind])

    def direct(operation: Operation, kind: RequestKind, arguments: Mapping[str, Any]) -> Answer:
        try:
            hosts_ = inventory()
            # The job is taken over for this call, so that no other controller acts on the guest.
            with recorder.taken_over(journal, operation, warn) as kept:
                return asyncio.run(direct_control.act(hosts_, operation, kind, arguments, kept))
        except (BadInput, HostUnreachable) as exc:
            raise jobs.unattended(operation, kind, arguments) from exc

    with jobs.open_journal() as journal:
        return jobs.control(journal, job, kind, arguments, direct)


async def _find(inventory: Inventory, name: str, to: str) -> Host:
    """Return the host from which a guest is to be moved.

    Raises BadInput if no host has the guest, HostUnreachable if the guest may be on a host that
    does not answer, OutcomeUnknown if the guest is active on two hosts.
    """
    found, errors = await fleet.guests(inventory)
    called = [
        GuestAt(host=host.name, uuid=guest.uuid, state=guest.state)
        for host, guest in found
        if name in (guest.name, guest.uuid)
    ]
    leaving = [host for host, guest in found if name in (guest.name, guest.uuid) and guest.leaves]
    if len(leaving) == 1:
        return leaving[0]  # preflight reports the job that holds the guest
    states = locate.one_guest(name, called, to=to)
    holder = locate.holder(name, states, to=to)
    if holder is not None and (states[holder].is_active or not errors):
        return inventory.host(holder)
    if errors:
        raise HostUnreachable(
            f"guest {name} is not running on any host that answered; no answer from"
            f" {silent_hosts(errors)}",
            host=next(iter(errors)),
            hint=f"{run_doctor(errors)}, or name the source with --from",
        )
    raise fleet.no_guest(inventory, name, found)
