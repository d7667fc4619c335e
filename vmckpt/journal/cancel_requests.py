"""Let other terminals cancel a job that accepts no other requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import RequestKind
from vmckpt.model.events import Caller

_EVERY = 0.2


@asynccontextmanager
async def stop_requested(all_: asyncio.Event) -> AsyncIterator[asyncio.Event]:
    """Yield a stop event for one of several jobs.

    The event is set when `all_` is set. Setting the event itself does not stop the other jobs.
    """
    stop = asyncio.Event()

    async def follow() -> None:
        await all_.wait()
        stop.set()

    task = asyncio.create_task(follow())
    try:
        yield stop
    finally:
        task.cancel()


@asynccontextmanager
async def cancellable_job(recorder: Recorder, caller: Caller) -> AsyncIterator[Caller]:
    """Yield the caller of a job, whose `stop` is also set if another terminal cancels this job."""
    async with stop_requested(caller.stop) as stop, answered(recorder, stop):
        yield replace(caller, stop=stop)


@asynccontextmanager
async def answered(recorder: Recorder, stop: asyncio.Event) -> AsyncIterator[None]:
    """Answer requests to a job during the block: a cancellation sets `stop`; others are refused."""

    async def serve() -> None:
        while True:
            for request in recorder.take_requests():
                cancels = request.kind == RequestKind.CANCEL
                text = "cancelling" if cancels else "this job can only be cancelled"
                recorder.answer(request, ok=cancels, text=text)
                if cancels:
                    stop.set()
            await asyncio.sleep(_EVERY)

    serving = asyncio.create_task(serve())
    try:
        yield
    finally:
        serving.cancel()
