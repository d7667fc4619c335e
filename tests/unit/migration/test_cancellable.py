"""Work that is waited for, and stopped here or from another terminal."""

import asyncio

import pytest

from vmckpt.errors import Cancelled
from vmckpt.migration.cancellable import cancellable


@pytest.mark.looptime
async def test_work_that_is_stopped_is_cancelled_and_said_to_be() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(5.0, stop.set)
    work = asyncio.create_task(asyncio.sleep(60))

    async def waits() -> None:
        await work

    with pytest.raises(Cancelled):
        await cancellable(waits(), stop)
    assert work.cancelled()


@pytest.mark.looptime
async def test_who_is_cancelled_waits_until_the_work_has_ended() -> None:
    """Else what is put back next meets work that is still being done."""
    seen: list[str] = []

    async def works() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            seen.append("the work ended")

    waiting = asyncio.create_task(cancellable(works(), asyncio.Event()))
    await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert seen == ["the work ended"]


@pytest.mark.looptime
async def test_work_that_ends_in_time_answers() -> None:
    async def works() -> str:
        await asyncio.sleep(1)
        return "done"

    assert await cancellable(works(), asyncio.Event()) == "done"
