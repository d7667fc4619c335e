"""Which room puts which kind of operation in order."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from vmckpt.journal.unattended import Unattended
from vmckpt.migrate import settling as moves
from vmckpt.model.recovery import Settled
from vmckpt.policy.types import Policy
from vmckpt.snapshot import preparing
from vmckpt.snapshot import settling as snapshots
from vmckpt.snapshot.settling_guard import settle_guard, settle_proof
from vmckpt.snapshot.settling_service import settle_service


class Room(Protocol):
    """How a room finishes and undoes its operations."""

    async def __call__(self, case: Unattended, policies: Sequence[Policy]) -> Settled:
        """Look at the hosts, decide, and do it, as far as the case says."""


async def _settle_protection(case: Unattended, policies: Sequence[Policy]) -> Settled:
    # Only who recovers one pays for what it needs.
    from vmckpt.protect import settling as protections  # noqa: PLC0415

    return await protections.settle(case, policies)


ROOMS: Mapping[str, Room] = {
    "migrate": moves.settle,
    "resume": moves.settle,
    "snapshot": snapshots.settle,
    "restore": snapshots.settle_restore,
    "guard": settle_guard,
    "prepare": preparing.settle,
    "proof": settle_proof,
    "protect": _settle_protection,
    "run": settle_service,
}
"""By the operation's kind."""
