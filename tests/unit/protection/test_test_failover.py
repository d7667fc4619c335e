"""Testing a failover, with a backup's agent that a test answers for."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vmckpt.errors import Cancelled, GuestLocked, OutcomeUnknown, VmckptError
from vmckpt.journal.records import Operation
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.protection import agent_client, test_failover
from vmckpt.protection.stop import Known
from vmckpt.units import Seconds

KNOWN = Known(
    operation=cast("Operation", SimpleNamespace(id="7", guest="web1", guest_uuid="u-1")),
    primary=Host(name="alpha", uri="qemu+tcp://alpha/system"),
    backup=Host(name="beta", uri="qemu+tcp://beta/system"), lease=None, session="5e55",
)  # fmt: skip
COPYING = {"state": "copying", "name": None, "uuid": "u-2", "epoch": None, "why": None}
COPIED = {**COPYING, "name": "web1-test", "pages_copied": 7}
RUNS = {**COPIED, "state": "runs", "epoch": 12, "since": 101.5, "taken": 100.0}
FAILED = {**COPIED, "state": "failed", "why": "its QEMU died"}


class Agent:
    """The backup's: it says one thing after the other."""

    def __init__(self) -> None:
        self.says: list[dict[str, Any] | None] = [None]
        self.refuses: str | None = None
        self.there = True
        self.did: list[str] = []
        self.warned: list[str] = []
        self.caller = Caller(emit=lambda _: None, warn=self.warned.append, stop=asyncio.Event())

    async def order(self, host: Host, guest: str, what: str, **more: Any) -> dict[str, Any]:
        assert (host.name, guest, what) == ("beta", "u-1", "ask")
        if not self.there:
            return {"role": "backup", "agent": False, "why": "the standby's QEMU is gone"}
        if wish := more.get("wish"):
            self.did.append(wish)
            if self.refuses is not None:
                return {"agent": True, "error": self.refuses}
            if wish == "end-test":
                self.says = [self.says[0], None]
        now = self.says[0]
        if len(self.says) > 1:
            self.says.pop(0)
        return {"role": "backup", "agent": True, "test": now}


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent()
    monkeypatch.setattr(agent_client, "order", made.order)
    monkeypatch.setattr(test_failover, "_TURN", 0.001)
    return made


async def test_it_returns_once_the_copy_runs_and_says_what_it_is(agent: Agent) -> None:
    agent.says = [COPYING, COPYING, COPIED, RUNS]
    done = await test_failover.begin(KNOWN, agent.caller)
    assert agent.did == ["test"]
    assert (done.name, done.uuid, done.host, done.epoch, done.age) == (
        "web1-test", "u-2", "beta", 12, 1.5,
    )  # fmt: skip
    assert "virsh -c qemu+tcp://beta/system console web1-test" in done.look
    assert "vmckpt failover web1 --end-test" in done.end
    assert agent.warned == ["beta: making a copy", "beta: copying web1-test"]
    assert done.as_json()["age_s"] == 1.5


async def test_what_the_backup_refuses_is_said_as_it_says_it(agent: Agent) -> None:
    agent.refuses = "a test of web1 runs already; end it first"
    with pytest.raises(GuestLocked, match="a test of web1 runs already"):
        await test_failover.begin(KNOWN, agent.caller)


async def test_without_a_standby_there_is_no_test(agent: Agent) -> None:
    agent.there = False
    for asked in (test_failover.begin, test_failover.end):
        with pytest.raises(GuestLocked, match="that can be tested: the standby's QEMU is gone"):
            await asked(KNOWN, agent.caller)


async def test_a_copy_that_does_not_run_is_an_error(agent: Agent) -> None:
    agent.says = [COPYING, FAILED]
    with pytest.raises(VmckptError, match="the failover test failed: its QEMU died"):
        await test_failover.begin(KNOWN, agent.caller)


async def test_an_agent_that_was_started_again_has_no_test(agent: Agent) -> None:
    agent.says = [COPYING, None]
    with pytest.raises(VmckptError, match="the failover test ended before its copy was running"):
        await test_failover.begin(KNOWN, agent.caller)


async def test_who_gives_up_has_the_copy_taken_away(agent: Agent) -> None:
    agent.says = [COPIED]
    agent.caller.stop.set()
    with pytest.raises(Cancelled, match="no copy of web1 is running"):
        await test_failover.begin(KNOWN, agent.caller)
    assert agent.did == ["test", "end-test"]


async def test_a_copy_that_never_runs_is_taken_away(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_failover, "_BEGINS", Seconds(0.01))
    agent.says = [COPIED]
    with pytest.raises(VmckptError, match=r"did not start within 0\.01 s and was removed"):
        await test_failover.begin(KNOWN, agent.caller)
    assert agent.did == ["test", "end-test"]


async def test_its_end_is_waited_for(agent: Agent) -> None:
    agent.says = [RUNS]
    done = await test_failover.end(KNOWN, agent.caller)
    assert agent.did == ["end-test"]
    assert done.name == "web1-test"


async def test_what_does_not_end_is_unknown(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_failover, "_ENDS", Seconds(0.01))

    async def stays(host: Host, guest: str, what: str, **more: Any) -> dict[str, Any]:
        del host, guest, what, more
        return {"agent": True, "test": RUNS}

    monkeypatch.setattr(agent_client, "order", stays)
    with pytest.raises(OutcomeUnknown, match="web1-test has not been removed from beta yet"):
        await test_failover.end(KNOWN, agent.caller)


async def test_one_that_failed_is_forgotten(agent: Agent) -> None:
    agent.says = [FAILED]
    assert (await test_failover.end(KNOWN, agent.caller)).name == "web1-test"
