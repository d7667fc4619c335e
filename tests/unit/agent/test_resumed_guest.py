"""What a guest is told that continues from an earlier state."""

import subprocess
import time
from pathlib import Path
from typing import Any, cast

import pytest

from vmckpt.agent import resumed_guest
from vmckpt.agent.resumed_guest import Reason, Resumed
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.units import Seconds


class Agent:
    """A guest agent. Programs run here, with another directory of hooks."""

    def __init__(self, hooks: Path) -> None:
        self.hooks = hooks
        self.silent = False
        self.refuses: tuple[str, ...] = ()
        self.clock = 0.0

    def there(self, *, limit: float) -> bool:
        return not self.silent

    def set_time(self, to: float, *, limit: float) -> None:
        if "time" in self.refuses:
            raise HypervisorError("alpha: guest-set-time is disabled", host="alpha")
        self.clock = to

    def execute(self, path: str, *words: str, limit: float, stdin: bytes) -> tuple[int, str]:
        if "exec" in self.refuses:
            raise HypervisorError("alpha: guest-exec is disabled", host="alpha")
        here = [one.replace(resumed_guest.HOOKS, str(self.hooks)) for one in words]
        done = subprocess.run([path, *here], input=stdin, capture_output=True, check=False)
        return done.returncode, " ".join(done.stderr.decode().split())


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(resumed_guest, "_ANSWERS", Seconds(0.0))
    (tmp_path / "resumed.d").mkdir()
    return Agent(tmp_path / "resumed.d")


def tell(agent: Agent, reason: Reason = Reason.FORK) -> Resumed:
    return resumed_guest.tell(cast("GuestAgent", cast("Any", agent)), reason, "web1-test")


def hook(agent: Agent, name: str, text: str, mode: int = 0o755) -> None:
    path = agent.hooks / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)


def test_the_clock_is_set_and_the_hooks_run_in_order_with_the_reason(agent: Agent) -> None:
    out = agent.hooks.parent / "out"
    hook(agent, "20-b", f'echo "b $VMCKPT_REASON $VMCKPT_GUEST ${{#VMCKPT_SEED}}" >>{out}')
    hook(agent, "10-a", f'echo "a $(cat)" >>{out}')
    hook(agent, "15-off", f"echo off >>{out}", mode=0o644)
    (agent.hooks / "12-folder").mkdir()
    assert tell(agent) == Resumed()
    assert out.read_text() == "a \nb fork web1-test 128\n"
    assert abs(agent.clock - time.time()) < 5


def test_each_guest_gets_another_seed(agent: Agent) -> None:
    out = agent.hooks.parent / "out"
    hook(agent, "10-seed", f'echo "$VMCKPT_SEED" >>{out}')
    for _ in range(2):
        tell(agent)
    assert len(set(out.read_text().split())) == 2


def test_a_hook_that_fails_is_named_and_the_others_run(agent: Agent) -> None:
    out = agent.hooks.parent / "out"
    hook(agent, "10-fails", "echo no such disk >&2; exit 3")
    hook(agent, "20-works", f"touch {out}")
    told = tell(agent)
    assert told.hooks == f"no such disk {agent.hooks}/10-fails: exit status 3"
    assert told.clock == ""
    assert out.exists()


def test_a_guest_without_hooks_is_not_complained_of(agent: Agent) -> None:
    agent.hooks.rmdir()
    assert tell(agent, Reason.RESTORE) == Resumed()


@pytest.mark.parametrize(
    ("refuses", "clock", "hooks"),
    [
        (("time",), "guest-set-time is disabled", ""),
        (("exec",), "", "guest-exec is disabled"),
    ],
)
def test_what_the_agent_refuses_is_reported(
    agent: Agent, refuses: tuple[str, ...], clock: str, hooks: str
) -> None:
    agent.refuses = refuses
    told = tell(agent)
    assert clock in told.clock
    assert hooks in told.hooks
    assert (bool(told.clock), bool(told.hooks)) == (bool(clock), bool(hooks))


def test_an_agent_that_does_not_answer_is_reported_after_a_while(agent: Agent) -> None:
    agent.silent = True
    assert tell(agent).clock == "its guest agent does not answer"
