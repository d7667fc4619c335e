"""The permission for a guest to run unprotected, without its standby.

The permission is recorded in the journal before it is granted. Every controller checks the journal
before it powers a host off (see replication.primary.solo_permission).
"""

import asyncio

from vmckpt.journal import jobs
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import StepState
from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.steps import Step


async def alone(job: str) -> tuple[int, ...]:
    """Return the numbers of the open steps of a protection that permit running unprotected.

    If there are none, the standby may run. Only the job's own controller gets a reliable answer,
    since another controller may grant the permission meanwhile. Raises JournalError.
    """
    return await asyncio.to_thread(_alone, job)


def _alone(job: str) -> tuple[int, ...]:
    with jobs.open_journal() as journal:
        steps = journal.steps(job)
    open_ = (one for one in steps if one.name == Step.ALONE and one.state is StepState.INTENDED)
    return tuple(one.seq for one in open_)


async def note(recorder: Recorder, job: str, why: str) -> None:
    """Record the permission, so that no controller starts the standby from now on.

    `job`: ID of the protection; `why`: why the guest may run unprotected. Raises JournalError,
    LeaseLost.
    """
    if not await alone(job):
        await asyncio.to_thread(recorder.intend, Step.ALONE, {"why": why})


async def grant(primary: Host, guest: str, name: str) -> None:
    """Grant the primary's request `name`, after `note` has recorded the permission.

    Raises VmckptError.
    """
    await agent_client.request(primary, guest, wish="alone", leave=name)


async def close(recorder: Recorder, job: str) -> None:
    """Close the permission in the journal, as the standby is complete again.

    `job`: ID of the protection. Raises JournalError, LeaseLost.
    """
    for seq in await alone(job):
        await asyncio.to_thread(recorder.conclude, seq, StepState.DONE)
