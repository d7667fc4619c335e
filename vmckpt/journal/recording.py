"""An agent's order in the journal, from its beginning to its end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from vmckpt.errors import Cancelled, RemoteError, VmckptError
from vmckpt.journal import recorder as journal
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import NewOperation
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.model.migration import Outcome


@asynccontextmanager
async def recorded(
    new: NewOperation, guest: str, warn: Callable[[str], None]
) -> AsyncIterator[Recorder]:
    """Write down that it begins and hold the lease on a guest (a UUID); what goes wrong is its end.

    Who uses it writes the good end down. Raises GuestBusy, JournalError, LeaseLost.
    """
    recorder = await asyncio.to_thread(journal.begin, new, warn)
    try:
        await asyncio.to_thread(recorder.acquire, guest_resource(guest))
        yield recorder
    except VmckptError as exc:
        # An agent that ended without a word, or could not undo all: recovery looks.
        if exc.undone and not isinstance(exc, RemoteError):
            if isinstance(exc, Cancelled):
                recorder.finish(Outcome.CANCELLED, None)
            else:
                recorder.finish(Outcome.FAILED, {"error": str(exc)})
        raise
    finally:
        await asyncio.to_thread(recorder.close)
