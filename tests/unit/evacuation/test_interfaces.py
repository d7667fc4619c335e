"""Who is made ready before its turn, and what becomes of it."""

import asyncio

import pytest

from tests.support.fleets import guest
from vmckpt.errors import Cancelled
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.interfaces import Prefetcher, Turn


def move(name: str, target: str = "beta") -> Move:
    return Move(tenant=guest(name, "alpha"), source="alpha", target=target)


class Workers:
    """Makes moves ready when it is told to, and tells who got a turn."""

    def __init__(self) -> None:
        self.events: dict[str, asyncio.Event] = {}
        self.began: list[str] = []
        self.ahead = Prefetcher(self.start)

    def start(self, one: Move, turn: Turn) -> "asyncio.Task[str]":
        event = self.events[f"{one.name} {one.target}"] = asyncio.Event()

        async def work() -> str:
            await event.wait()
            try:
                await turn.wait()
            except Cancelled:
                return "refused"
            self.began.append(one.name)
            return "moved"

        return asyncio.create_task(work())

    async def ready(self, name: str, target: str = "beta") -> None:
        self.events[f"{name} {target}"].set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_one_after_the_other_and_only_a_few() -> None:
    world, waiting = Workers(), [move(f"w{number}") for number in range(5)]
    for _ in range(3):
        world.ahead.look(waiting)
        assert list(world.events) == ["w0 beta"]
    await world.ready("w0")
    world.ahead.look(waiting)
    await world.ready("w1")
    world.ahead.look(waiting)
    assert list(world.events) == ["w0 beta", "w1 beta"]
    assert world.began == []

    work = world.ahead.begin(waiting[1])
    assert (await work, world.began) == ("moved", ["w1"])
    await world.ahead.dismiss()
    assert world.began == ["w1"]


async def test_who_has_begun_and_is_not_ready_is_waited_for() -> None:
    world = Workers()
    work = world.ahead.begin(move("w0"))
    world.ahead.look([move("w1")])
    assert list(world.events) == ["w0 beta"]
    await world.ready("w0")
    world.ahead.look([move("w1")])
    assert list(world.events) == ["w0 beta", "w1 beta"]
    assert await work == "moved"
    world.ahead.cancel()


@pytest.mark.parametrize("how", ["looked", "begun"])
async def test_who_goes_elsewhere_by_now_is_made_ready_anew(how: str) -> None:
    world = Workers()
    world.ahead.look([move("w0", "beta")])
    await world.ready("w0")
    (old,) = world.ahead.works
    if how == "looked":
        world.ahead.look([move("w0", "gamma")])
    work = world.ahead.begin(move("w0", "gamma"))
    await world.ready("w0", "gamma")
    assert (await old, await work) == ("refused", "moved")
