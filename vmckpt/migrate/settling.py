"""A migration without a controller, as recovery asks for it."""

from collections.abc import Sequence

from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.migrate import recovering
from vmckpt.migrate.recovering import Recovery
from vmckpt.migrate.requests import Setting
from vmckpt.model.callers import Caller
from vmckpt.model.recovery import Settled


async def settle(
    setting: Setting,
    operation: Operation,
    steps: Sequence[StoredStep],
    recorder: Recorder | None,
    caller: Caller,
    *,
    adopt: bool,
) -> Settled:
    """See recover.rooms.Room."""
    async with Recovery(setting, recovering.left(operation, steps)) as recovery:
        verdict = await recovery.decide()
        told = recovering.settled(verdict)
        if recorder is None or not verdict.known or (told.goes_on and not adopt):
            return told
        return await recovery.carry_out(verdict, recorder, caller)
