"""Going on by hand with a post-copy that broke, under the order that it was begun with."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.hypervisor import guests
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.journal import recorder as journal
from vmckpt.journal.records import NewOperation, Operation
from vmckpt.migrate import command, planning, report, terms
from vmckpt.migrate.engine import Emit, Ending, Migration
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.requests import Caller, Setting
from vmckpt.model.events import Event
from vmckpt.model.orders import Mode, MoveOrder
from vmckpt.policy import select
from vmckpt.policy.types import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """What the journal has of a post-copy that may be broken."""

    job: str
    guest: str
    uuid: str
    order: MoveOrder
    policy: Policy


async def resume(setting: Setting, operation: Operation, caller: Caller) -> MigrationReport:
    """Resume; the report of this attempt, which is a job of its own.

    Raises BadInput if there is nothing to resume: the journal has no order, or the guest is not in
    post-copy on the source.
    """
    broken = _broken(setting, operation)
    async with (
        Hypervisor(setting.source) as here,
        Hypervisor(setting.target) as there,
        planning.logins(here, there) as remotes,
    ):
        seen = await guests.presence(here, broken.uuid)
        if seen.reachable and not seen.post_copy:
            raise BadInput(
                f"{broken.guest} is not in post-copy on {setting.source.name}",
                mend=f"vmckpt guests shows where it is; vmckpt job {broken.job} what happened",
            )
        new = NewOperation(
            kind="resume",
            guest=broken.guest,
            guest_uuid=broken.uuid,
            source=setting.source.name,
            target=setting.target.name,
            policy=broken.policy.name,
            mode=str(Mode.POSTCOPY),
            detail={"of": broken.job, "order": broken.order.as_json()},
        )
        recorder = await asyncio.to_thread(journal.begin, new, caller.warn)
        with recorder:
            mover = command.mover((here, there), remotes, broken.guest, broken.uuid)
            terms_ = terms.resumed(broken.policy)
            engine = Migration(mover, terms_, _both(caller, recorder), caller.stop, desk=recorder)
            ending = await engine.resume(broken.order)
            told = _report(setting, broken, ending, recorder.id)
            recorder.finish(ending.outcome, report.as_json(told))
            return told


def _both(caller: Caller, recorder: journal.Recorder) -> Emit:
    def emit(event: Event) -> None:
        recorder.take(event)
        caller.emit(event)

    return emit


def _broken(setting: Setting, operation: Operation) -> _Broken:
    stored: Mapping[str, Any] | None = operation.detail.get("order")
    if stored is None or operation.guest_uuid is None:
        raise BadInput(
            f"{operation.id} never gave libvirt an order: there is nothing to resume",
            mend="vmckpt jobs --all shows the others",
        )
    try:
        order = MoveOrder.from_json(stored)
    except (KeyError, TypeError, ValueError) as exc:
        raise BadInput(f"{operation.id}: its order in the journal makes no sense ({exc})") from exc
    known = {policy.name: policy for policy in setting.policies}
    policy = known.get(operation.policy or "") or select.by_name(setting.policies, select.DEFAULT)
    return _Broken(
        job=operation.id,
        guest=operation.guest,
        uuid=operation.guest_uuid,
        order=order,
        policy=policy,
    )


def _report(setting: Setting, broken: _Broken, ending: Ending, job: str | None) -> MigrationReport:
    return MigrationReport(
        guest=broken.guest,
        source=setting.source.name,
        target=setting.target.name,
        outcome=ending.outcome,
        driver=ending.driver,
        began=ending.began,
        elapsed=ending.elapsed,
        totals=None,
        observed_downtime=None,
        samples=ending.samples,
        decisions=ending.decisions,
        warnings=ending.warnings,
        error=ending.error,
        policy=broken.policy.name,
        mode=Mode.POSTCOPY,
        job=job,
    )
