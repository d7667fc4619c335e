"""Counts of an agent: what is asked, and what is believed."""

import asyncio
from typing import Any, cast

import pytest

from tests.support.builders import GUEST, HOST
from vmckpt.agent import client
from vmckpt.errors import RemoteError
from vmckpt.migration.forecast import tracked_writes
from vmckpt.model.migration import DirtyPoint
from vmckpt.remote.ssh import Remote
from vmckpt.units import MIB, Seconds

REMOTE = cast("Remote", type("Fake", (), {"host": HOST})())


class Agent:
    """An agent that gives one answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.points: Any = [[0.1, 4 * MIB], [0.3, 9 * MIB]]
        self.waits = False
        self.orders: list[dict[str, Any]] = []
        monkeypatch.setattr(client, "run_order", self.run)

    async def run(
        self, host: object, order: dict[str, Any], emit: object, stop: asyncio.Event, *,
        remote: Remote, install: bool,
    ) -> dict[str, Any]:  # fmt: skip
        assert (host, remote, install) == (HOST, REMOTE, False)
        self.orders.append(order)
        if self.waits:
            await stop.wait()
        return {"points": self.points}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    return Agent(monkeypatch)


async def ask(within: float = 5.0) -> tuple[DirtyPoint, ...]:
    return await tracked_writes.count(REMOTE, GUEST, [0.1, 0.3, 1.0], Seconds(within))


async def test_the_pages_are_counted_exactly(agent: Agent) -> None:
    found = await ask()

    assert [(one.time, one.dirtied, one.error) for one in found] == [
        (0.1, 4 * MIB, 0.0), (0.3, 9 * MIB, 0.0),
    ]  # fmt: skip
    (order,) = agent.orders
    assert (order["do"], order["guest"], order["times"]) == (
        "count-writes", GUEST.uuid, (0.1, 0.3, 1.0),
    )  # fmt: skip


async def test_a_count_is_ended_in_time(agent: Agent) -> None:
    agent.waits = True

    async with asyncio.timeout(3.0):
        assert len(await ask(within=0.05)) == 2


@pytest.mark.parametrize(
    "points",
    [
        None, [], [[0.1]], [[0.3, 1], [0.1, 2]], [[0.0, 1]], [[9e9, 1]], [[0.1, -1]], [[0.1, 1e15]],
        [["x", 1]], [[float("nan"), 1]], [[0.1, float("nan")]],
    ],
)  # fmt: skip
async def test_nonsense_is_not_believed(agent: Agent, points: object) -> None:
    agent.points = points

    with pytest.raises(RemoteError, match="invalid message"):
        await ask()
