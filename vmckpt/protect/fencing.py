"""A protected guest's dead host is powered off, and the journal says so, before the guest runs
anywhere else."""

import asyncio
import time
from contextlib import suppress

from vmckpt.errors import JournalError, VmckptError
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import StepState
from vmckpt.model.events import Caller
from vmckpt.model.fencing import Fenced
from vmckpt.model.host import Host
from vmckpt.protect.steps import Step
from vmckpt.remote import fence_agent


async def fence(host: Host, recorder: Recorder, caller: Caller) -> Fenced:
    """Returns once the host is off for certain; may be repeated. Raises VmckptError: it may be on.

    The options, of which some are secrets, are written down nowhere.
    """
    agents = "" if host.fence is None else host.fence.in_words
    for path in () if host.fence is None else fence_agent.too_open(host.fence):
        caller.warn(f"{path}: others may read the password in it; run chmod 600 {path}")
    intent = {"host": host.name, "agent": agents, "action": "off"}
    step = await asyncio.to_thread(recorder.intend, Step.FENCE, intent)
    caller.warn(f"fencing {host.name}: {agents} powers it off, with all that runs there")
    try:
        done = await fence_agent.power_off(host, caller.stop)
    except VmckptError as exc:
        # It may be off all the same; left open, the step would become a done one at the end.
        told = {"error": exc.message, "at": time.time()}
        with suppress(VmckptError):
            await asyncio.to_thread(recorder.conclude, step, StepState.FAILED, told)
        raise
    with suppress(JournalError):  # the guest must not wait for a full disk here
        await asyncio.to_thread(recorder.conclude, step, StepState.DONE, done.as_json())
    caller.warn(f"{host.name} is off, says {done.agent}")
    return done
