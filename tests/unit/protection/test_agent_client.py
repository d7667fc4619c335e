"""Both agents of a protection are asked, and neither is waited for in vain."""

import asyncio

import pytest

from vmckpt.model.host import Host
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.units import Seconds

HOSTS = {name: Host(name=name, uri="test:///default") for name in ("alpha", "beta", "gamma")}


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Alpha answers, beta falls silent in the middle, gamma knows nothing; who was given up."""
    given_up: list[str] = []

    async def status(host: Host, _: str) -> ProtectionStatus:
        if host.name == "beta":
            try:
                await asyncio.sleep(60)
            finally:
                given_up.append(host.name)
        return parse_answer({"role": "primary"} if host.name == "alpha" else {})

    monkeypatch.setattr(agent_client, "status", status)
    return given_up


async def test_who_falls_silent_in_the_middle_keeps_nobody_waiting(ended: list[str]) -> None:
    async with asyncio.timeout(5):
        told = await agent_client.both(HOSTS, "u-1", Seconds(0.05))
    assert told == {
        "alpha": ProtectionStatus(role="primary"),
        "beta": ProtectionStatus(error="beta does not answer"),
    }  # fmt: skip
    await asyncio.sleep(0)
    assert ended == ["beta"]


async def test_who_no_longer_wants_to_know_leaves_nothing_behind(ended: list[str]) -> None:
    asked = asyncio.create_task(agent_client.both(HOSTS, "u-1"))
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await asyncio.sleep(0)
    assert ended == ["beta"]


async def test_nobody_may_be_asked() -> None:
    assert await agent_client.both({}, "u-1", Seconds(1.0)) == {}
