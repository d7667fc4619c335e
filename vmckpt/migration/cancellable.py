"""Wait for work that can be cancelled from this terminal or another."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from vmckpt.errors import Cancelled
from vmckpt.journal.records import RequestKind
from vmckpt.migration.run.operator_requests import StepLog

T = TypeVar("T")
_EVERY = 0.2


async def cancellable(work: Coroutine[object, object, T], stop: asyncio.Event) -> T:
    """Wait for `work` and return its result.

    If `stop` is set first, cancel the work and raise Cancelled.
    """
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise Cancelled("stopped before the guest was changed")
    finally:
        stopping.cancel()
        # The work must have ended before the caller undoes it.
        if not working.done():
            working.cancel()
            await asyncio.wait([working])
            if not working.cancelled():
                working.exception()  # otherwise asyncio would log the exception


async def with_requests_answered(
    work: Coroutine[object, object, T], stop: asyncio.Event, step_log: StepLog
) -> T:
    """Wait for `work` and return its result, as `cancellable` does; let other terminals cancel it.

    Other requests are refused, since no memory is being sent. Raises Cancelled; LeaseLost if
    another controller has taken over.
    """

    async def serve() -> None:
        while True:
            for request in step_log.take_requests():
                cancels = request.kind == RequestKind.CANCEL
                text = "cancelling" if cancels else "no memory is being sent; try again later"
                step_log.answer(request, ok=cancels, text=text)
                if cancels:
                    stop.set()
            await asyncio.sleep(_EVERY)

    serving = asyncio.create_task(serve())
    try:
        done = await cancellable(work, stop)
        if serving.done():
            serving.result()  # another controller has taken over
        return done
    finally:
        serving.cancel()
