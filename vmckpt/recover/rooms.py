"""Which room puts which kind of operation in order."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.migrate import settling
from vmckpt.migrate.requests import Setting
from vmckpt.model.callers import Caller
from vmckpt.model.recovery import Settled


class Room(Protocol):
    """How a room finishes and undoes its operations."""

    async def __call__(
        self,
        setting: Setting,
        operation: Operation,
        steps: Sequence[StoredStep],
        recorder: Recorder | None,
        caller: Caller,
        *,
        adopt: bool,
    ) -> Settled:
        """Look at the hosts, decide, and do it; with `adopt` what still runs is watched to its end.

        Without a recorder it only says what would be done.
        """


ROOMS: Mapping[str, Room] = {"migrate": settling.settle, "resume": settling.settle}
"""By the operation's kind."""
