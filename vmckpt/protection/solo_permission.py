"""Permission for a guest to go on without its standby.

It is in the journal first, where every controller sees it before it powers a host off (see
replication.primary.solo_permission).
"""

import asyncio

from vmckpt.journal import jobs
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import StepState
from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.steps import Step


async def alone(job: str) -> tuple[int, ...]:
    """The open steps of a protection that gave leave; none: its standby may run. To be asked by
    its controller alone, or it is an opinion. Raises JournalError."""
    return await asyncio.to_thread(_alone, job)


def _alone(job: str) -> tuple[int, ...]:
    with jobs.open_journal() as journal:
        steps = journal.steps(job)
    open_ = (one for one in steps if one.name == Step.ALONE and one.state is StepState.INTENDED)
    return tuple(one.seq for one in open_)


async def note(recorder: Recorder, job: str, why: str) -> None:
    """From now on no controller lets the standby run. Raises JournalError, LeaseLost."""
    if not await alone(job):
        await asyncio.to_thread(recorder.intend, Step.ALONE, {"why": why})


async def grant(primary: Host, guest: str, name: str) -> None:
    """Once it is noted: under the name that the primary asked for. Raises VmckptError."""
    await agent_client.request(primary, guest, wish="alone", leave=name)


async def has_permission(recorder: Recorder, job: str) -> None:
    """Its standby is whole again. Raises JournalError, LeaseLost."""
    for seq in await alone(job):
        await asyncio.to_thread(recorder.conclude, seq, StepState.DONE)
