"""Where a group's agents meet: all go on together, or all are let go."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.groups import MEMBERS, PHASES
from vmckpt.errors import CaptureFailed, RemoteError
from vmckpt.model.recovery import Phase
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.barrier import Cutting
from vmckpt.units import Seconds

Act = Callable[[Cutting, asyncio.Event], Awaitable[None]]


def cut_through(act: Act, *members: str) -> Cutting:
    async def run() -> Cutting:
        stop = asyncio.Event()
        async with Cutting("g-1", frozenset(members or MEMBERS), stop) as cutting:
            await asyncio.wait_for(act(cutting, stop), 5.0)
        return cutting

    return asyncio.run(run())


def test_nobody_passes_before_the_last() -> None:
    passed: list[tuple[str, Phase]] = []

    async def act(cutting: Cutting, _: asyncio.Event) -> None:
        async def agent(name: str, slow: float) -> None:
            for phase in PHASES:
                await asyncio.sleep(slow)
                passed.append((f"{name} at", phase))
                await cutting.reached(name, phase)
                passed.append((f"{name} past", phase))

        await asyncio.gather(agent("a", 0.0), agent("b", 0.01))

    cutting = cut_through(act)
    for phase in PHASES:
        came = [passed.index((f"{name} at", phase)) for name in "ab"]
        went = [passed.index((f"{name} past", phase)) for name in "ab"]
        assert max(came) < min(went)
    assert cutting.ended
    assert cutting.failure is None


@pytest.mark.parametrize("phase", PHASES)
def test_one_fails_and_all_are_let_go(phase: Phase) -> None:
    async def act(cutting: Cutting, _: asyncio.Event) -> None:
        for before in PHASES[: PHASES.index(phase)]:
            await asyncio.gather(cutting.reached("a", before), cutting.reached("b", before))
        waiting = asyncio.create_task(cutting.reached("a", phase))
        await asyncio.sleep(0)
        await cutting.fail(RemoteError("beta: the agent ended"))
        with pytest.raises(CaptureFailed, match="beta: the agent ended; all guests keep running"):
            await waiting
        with pytest.raises(CaptureFailed, match="the agent ended"):
            await cutting.reached("b", phase)
        assert cutting.stop.is_set()

    assert not cut_through(act).ended


def test_who_is_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {**rules.LIMITS, Phase.STOPPED: Seconds(0.05)}
    monkeypatch.setattr(rules, "LIMITS", limits)

    async def act(cutting: Cutting, _: asyncio.Event) -> None:
        await asyncio.gather(*(cutting.reached(one, Phase.READY) for one in MEMBERS))
        with pytest.raises(CaptureFailed, match=r"^not stopped within 0\.05 s: b;"):
            await cutting.reached("a", Phase.STOPPED)

    assert cut_through(act).stop.is_set()


def test_ctrl_c_lets_all_go() -> None:
    async def act(cutting: Cutting, stop: asyncio.Event) -> None:
        waiting = asyncio.create_task(cutting.reached("a", Phase.READY))
        await asyncio.sleep(0)
        stop.set()
        with pytest.raises(CaptureFailed, match="was stopped"):
            await waiting

    assert cut_through(act).stop.is_set()
