"""Jobs that other terminals can cancel, each by itself."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.following import take
from tests.support.recording import WEB1
from vmckpt.errors import Cancelled, GuestLocked
from vmckpt.journal import jobs
from vmckpt.journal.cancel_requests import cancellable_job, stop_requested
from vmckpt.journal.recorder import recorded
from vmckpt.journal.records import RequestKind
from vmckpt.journal.store import Journal
from vmckpt.model.events import Caller


async def works(caller: Caller, begun: asyncio.Event) -> None:
    """A job that can only be cancelled."""
    async with (
        recorded(WEB1, "u-1", caller.warn) as recorder,
        cancellable_job(recorder, caller) as mine,
    ):
        begun.set()
        await asyncio.wait_for(mine.stop.wait(), 30.0)
        raise Cancelled("stopped")


async def test_a_job_in_the_way_is_cancelled_by_the_command_of_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())
    begun = asyncio.Event()
    working = asyncio.create_task(works(caller, begun))
    await begun.wait()
    with pytest.raises(GuestLocked) as caught:
        async with recorded(WEB1, "u-1", print):
            raise AssertionError("both hold the guest")
    _, cancel, _ = take(str(caught.value))

    def other_requests() -> jobs.Answer:
        with Journal() as journal:
            return jobs.control(journal, cancel.words[2], RequestKind.PAUSE, {})

    refused = await asyncio.to_thread(other_requests)
    assert (refused.ok, refused.text) == (False, "this job can only be cancelled")
    assert not working.done()

    program = (sys.executable, "-m", "vmckpt.cli.app", *cancel.words[1:])
    assert await (await asyncio.create_subprocess_exec(*program)).wait() == 0
    with pytest.raises(Cancelled):
        await working
    assert not caller.stop.is_set()  # other jobs of the same caller go on
    with Journal() as journal:
        assert journal.operation(cancel.words[2], ended=True).outcome == "cancelled"
    async with recorded(WEB1, "u-1", print) as recorder:
        recorder.finish("completed", None)


async def test_one_of_several_stops_alone_and_all_stop_together() -> None:
    every = asyncio.Event()
    async with stop_requested(every) as mine, stop_requested(every) as other:
        mine.set()
        await asyncio.sleep(0)
        assert (every.is_set(), other.is_set()) == (False, False)
        every.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert other.is_set()
