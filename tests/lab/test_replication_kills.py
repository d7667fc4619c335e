"""The agent of a protection killed at each call to QEMU of an epoch: others can use the guest."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import Bench, gathered, until, usable
from tests.lab.protecting import (
    GUEST,
    LEFT,
    SOON,
    agent,
    asked,
    lab_with_witness,
    left,
    on_qemu,
    protect,
    signalled,
    tidied,
)
from tests.support.paths import ROOT
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt_lab import host
from vmckpt_lab.machine_speed import slowness

pytestmark = pytest.mark.long

GUARD = b"vmckpt.replication.watchdog.process"
SILENCE = 9.0


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"k{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made


CALLS = (
    "getfd:1", "stop:1", "migrate:1", "query-status:1", "qom-set:1", "cont:1", "query-block-jobs:1",
    "qom-set:2", "qom-set:3", "qom-set:4",
)  # fmt: skip
SOME = ("qom-set:1",)


def _mortal(bench: Bench, at: str) -> None:
    """Let the guest's agent be one that dies there, and wait until it has."""
    first = host.first_process(bench.plan.host("alpha"))
    (page,) = Path(f"/proc/{first}/root{LEFT}").glob("*/page")
    folder = f"{LEFT}/{page.parent.name}"
    known = _agent_of(page)
    signalled(bench, "alpha", GUARD, signal.SIGSTOP)
    os.kill(agent(bench, "alpha"), signal.SIGKILL)
    program = [sys.executable, "-m", "tests.lab.killing", folder, at]
    inside = host.enter(
        bench.plan.host("alpha"), "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *program
    )
    with subprocess.Popen(inside, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as mortal:
        until(lambda: _agent_of(page) != known)
        signalled(bench, "alpha", GUARD, signal.SIGCONT)
        _, said = gathered(mortal, limit=60.0)
    assert mortal.returncode in (137, -9), said.decode(errors="replace")[-3000:]


def _agent_of(page: Path) -> int:
    opened = WatchdogPage.open(page)
    try:
        return opened.agent
    finally:
        opened.close()


@pytest.mark.parametrize(
    "at",
    [
        pytest.param(one, marks=[] if one in SOME else [pytest.mark.campaign])
        for call in CALLS
        for one in (call, f"{call}+")
    ],
)
def test_killed_at_any_call_of_an_epoch_it_goes_on_and_others_can_use_the_guest(
    pair: Bench, at: str
) -> None:
    pair.guest(**GUEST)
    # With a lease it would run out while one agent is put in the place of another.
    protect(pair, automatic=False)
    killed = time.monotonic()
    _mortal(pair, at)
    # Every second time nobody waits for the agent that comes next.
    if not at.endswith("+"):
        until(lambda: asked(pair).get("phase") == "protecting", limit=SOON)
        assert asked(pair, "beta")["ready"]
    pair.good("unprotect", "web1")
    assert pair.seen(since=killed, until=time.monotonic()).blackout < SILENCE * slowness()
    assert left(pair) == []
    assert on_qemu(pair, "alpha") == []
    usable(pair)
