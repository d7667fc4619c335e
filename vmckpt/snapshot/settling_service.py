"""A service of schedules without its process: it held leases on them, and nothing else is left."""

from collections.abc import Sequence

from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.model.callers import Caller
from vmckpt.model.jobs import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.types import Policy


async def settle_service(
    inventory: Inventory,
    policies: Sequence[Policy],
    operation: Operation,
    steps: Sequence[StoredStep],
    recorder: Recorder | None,
    *,
    caller: Caller,
    adopt: bool,
) -> Settled:
    """See recover.rooms.Room. The snapshots it was at are operations of their own."""
    del inventory, policies, operation, steps, caller, adopt
    told = Settled(
        truth="the service has ended", outcome=Outcome.FAILED, did=("give its schedules back",)
    )
    if recorder is not None:
        recorder.finish(Outcome.FAILED, {"recovered": told.as_json()})
    return told
