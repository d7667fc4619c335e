"""A run of the service from its first look to its end."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.builders import GUEST
from tests.support.services import World, world
from vmckpt.errors import BadInput
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal

__all__ = ["world"]


async def test_once_does_all_that_is_due_and_ends(world: World) -> None:
    assert await world.run() == 0

    [(store, request)] = world.asked[:1]
    assert (store, request.guest, request.tags) == ("near", GUEST.uuid, {"schedule": "often"})
    assert world.has("near") == world.has("far")
    events = [one.event for one in world.told]
    assert (events[0], events[-1]) == ("started", "stopped")
    assert {"took", "copied", "verified", "collected"} <= set(events)
    assert True in (await world.verdicts()).values()
    with Journal() as journal:
        [job] = journal.operations()
    assert (job.kind, job.outcome) == ("run", "completed")


async def test_what_a_killed_service_held_is_taken_over(world: World) -> None:
    with Journal() as journal:
        dead = replace(controller_identity.this_process(), pid=1, started=1)
        id_ = journal.begin(NewOperation(kind="run", guest="schedules"), controller=dead)
        journal.acquire(id_, "schedule/mine/often", by=dead)
    await world.run()

    assert len(world.asked) >= 1
    with Journal() as journal:
        assert journal.operation(id_, ended=True).outcome == "failed"


def test_it_is_bad_input_to_act_where_only_looking_is_allowed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_READ_ONLY", "1")
    with pytest.raises(BadInput, match="read-only mode forbids this command"):
        asyncio.run(world.run())
