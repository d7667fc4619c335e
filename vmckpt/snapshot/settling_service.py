"""A service of schedules without its process: it held leases on them, and nothing else is left."""

from collections.abc import Sequence

from vmckpt.journal.recorder import Unattended
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy


async def settle_service(case: Unattended, policies: Sequence[Policy]) -> Settled:
    """See recover.rooms.Room. The snapshots it was at are operations of their own."""
    del policies
    told = Settled(
        truth="the service has ended", outcome=Outcome.FAILED, did=("give its schedules back",)
    )
    return case.ended(told)
