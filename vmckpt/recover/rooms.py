"""Which room puts which kind of operation in order."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.migrate import settling as moves
from vmckpt.model.callers import Caller
from vmckpt.model.recovery import Settled
from vmckpt.policy.types import Policy
from vmckpt.snapshot import preparing
from vmckpt.snapshot import settling as snapshots
from vmckpt.snapshot.settling_guard import settle_guard, settle_proof
from vmckpt.snapshot.settling_service import settle_service


class Room(Protocol):
    """How a room finishes and undoes its operations."""

    async def __call__(
        self,
        inventory: Inventory,
        policies: Sequence[Policy],
        operation: Operation,
        steps: Sequence[StoredStep],
        recorder: Recorder | None,
        *,
        caller: Caller,
        adopt: bool,
    ) -> Settled:
        """Look at the hosts, decide, and do it; with `adopt` what still runs is watched to its end.

        Without a recorder it only says what would be done.
        """


ROOMS: Mapping[str, Room] = {
    "migrate": moves.settle,
    "resume": moves.settle,
    "snapshot": snapshots.settle,
    "restore": snapshots.settle_restore,
    "guard": settle_guard,
    "prepare": preparing.settle,
    "proof": settle_proof,
    "run": settle_service,
}
"""By the operation's kind."""
