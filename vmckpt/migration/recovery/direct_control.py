"""Control a migration whose controller is gone, directly through the source's libvirt."""

from collections.abc import Mapping
from typing import Any

from vmckpt.errors import BadInput
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.inventory import Inventory
from vmckpt.journal.jobs import Answer
from vmckpt.journal.recorder import JournalStepLog, Recorder
from vmckpt.journal.records import Operation, RequestKind
from vmckpt.migration import attempt
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.run.operator_requests import NO_WAY_BACK
from vmckpt.model.migration import JobPhase, MigrationDriver, Mode
from vmckpt.units import BytesPerSecond, Seconds

BY_AGENTS = (
    "the job's controller is gone, and agents do not switch over on their own: run vmckpt recover,"
    " which keeps the guest on the source, or completes the migration if the guest was handed over"
)
_PUT_BACK = {RequestKind.BANDWIDTH: Step.BANDWIDTH, RequestKind.PAUSE: Step.PAUSE}


async def act(
    inventory: Inventory,
    operation: Operation,
    kind: RequestKind,
    arguments: Mapping[str, Any],
    recorder: Recorder,
) -> Answer:
    """Carry out a request as the operation's controller. Returns the answer.

    `arguments`: of the request, as stored in the journal; `recorder`: of the operation. Raises
    BadInput if the guest had not begun to move; InventoryError if a host is not in the inventory;
    HypervisorError, HostUnreachable, OutcomeUnknown, JournalError or LeaseLost.
    """
    if operation.guest_uuid is None:
        raise BadInput(f"{operation.id} had not begun to move {operation.guest}")
    if operation.mode == Mode.CHECKPOINT:
        return Answer(ok=False, text=BY_AGENTS)
    source = inventory.host(operation.source or "")
    target = inventory.host(operation.target or "")
    async with Hypervisor(source) as here, Hypervisor(target) as there:
        step_log = JournalStepLog(recorder)
        migrations = attempt.migration_driver(
            (here, there), None, operation.guest, operation.guest_uuid, step_log.check
        )
        sample = await migrations.sample()
        if sample is None:
            return Answer(ok=False, text=f"{operation.guest} is not migrating from {source.name}")
        if sample.phase is JobPhase.POST_COPY and kind is not RequestKind.BANDWIDTH:
            return Answer(ok=False, text=NO_WAY_BACK)
        if (step := _PUT_BACK.get(kind)) is not None:
            await step_log.intend(step, {"what": str(kind)})
        text = await _do(migrations, kind, arguments)
    return Answer(
        ok=True, text=f"{text}; done directly on {source.name}, since the job's controller is gone"
    )


async def _do(migrations: MigrationDriver, kind: RequestKind, arguments: Mapping[str, Any]) -> str:
    match kind:
        case RequestKind.BANDWIDTH:
            rate = arguments.get("bytes_per_second")
            limit = None if rate is None else BytesPerSecond(int(rate))
            await migrations.set_bandwidth(limit, post_copy=False)
            await migrations.set_bandwidth(limit, post_copy=True)
            return "bandwidth set"
        case RequestKind.MAX_DOWNTIME:
            await migrations.set_max_downtime(Seconds(float(arguments["seconds"])))
            return "downtime limit set"
        case RequestKind.POSTCOPY:
            await migrations.start_post_copy()
            return "switched to post-copy"
        case RequestKind.PAUSE:
            await migrations.pause_guest()
            return "the guest is paused"
        case RequestKind.CANCEL:
            await migrations.abort()
            return "cancelled"
        case RequestKind.GO_ON:
            return "nothing done"
