"""The watchdog on hosts in need: processors that are busy, and a kernel that refuses ptrace."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import WHOLE, Bench, until
from tests.lab.protecting import (
    GUEST,
    PREPARED,
    SOON,
    asked,
    epochs,
    lab_with_witness,
    ours,
    processes,
    protect,
    signalled,
    tidied,
)
from tests.lab.starving import Victim, busy
from tests.support.paths import ROOT
from vmckpt_lab import host, network
from vmckpt_lab.faults import inject

pytestmark = pytest.mark.long

AGENT, WATCHDOG = b"vmckpt.agent.replication.main", b"vmckpt.replication.watchdog.process"
MOST = 2.0
"""Seconds that a guest may be paused for an epoch."""


@pytest.fixture(scope="module")
def witnessed() -> Iterator[Bench]:
    with lab_with_witness(f"w{os.getpid()}") as made:
        yield made


@pytest.fixture
def pair(witnessed: Bench) -> Iterator[Bench]:
    with tidied(witnessed) as made:
        yield made


def test_on_busy_processors_an_agent_that_dies_in_a_pause_costs_less_than_two_seconds(
    pair: Bench,
) -> None:
    """Each new agent was killed while it was still starting, and the guest was paused for 18 s."""
    pair.guest(**GUEST)
    protect(pair, "--ttl", "30s")
    epochs(pair)
    victim = Victim(pair)
    with busy():
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            struck = victim.strike(number)
            assert struck.paused < MOST, (number, struck, victim.log())
            # CPUs that run again may wait for a processor.
            assert struck.still < MOST + 0.5, (number, struck, victim.log())
            until(lambda: asked(pair).get("phase") == "protecting", limit=SOON)
    killed = [line for line in victim.log() if "killed the agent" in line]
    # The one that was stopped, and none that was starting.
    assert len(killed) == 1, victim.log()
    assert "has been paused" in killed[0]
    victim.close()
    epochs(pair)
    pair.good("failover", "web1", "--planned")
    assert pair.where() == ["beta"]
    assert pair.ledgers() == WHOLE


def _without_ptrace(bench: Bench, name: str) -> None:
    """Agents of a host come by ssh: from now on they may not trace QEMU there."""
    bench.inside(name, "pkill", "-x", "sshd")
    sshd = ["/usr/sbin/sshd", "-f", "/etc/ssh/lab_sshd_config"]
    program = [sys.executable, "-m", "tests.lab.untraced", *sshd]
    bench.inside(name, "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *program)
    host.wait_until_up(bench.plan.host(name))


def _pair(bench: Bench) -> tuple[int, int]:
    """The watchdog that acts, and its spare."""
    found = processes(bench, "alpha", WATCHDOG)
    parents = {one: _parent(one) for one in found}
    (spare,) = [one for one in found if parents[one] in found]
    (acting,) = [one for one in found if one == parents[spare]]
    return acting, spare


def _parent(process: int) -> int:
    stat = Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


def _killed_with_agent(bench: Bench, watchdog: int) -> None:
    """Kill both at once, and wait until others are there."""
    agent = asked(bench)["process"]
    os.kill(watchdog, signal.SIGKILL)
    signalled(bench, "alpha", AGENT, signal.SIGKILL)
    until(lambda: asked(bench).get("process") not in (None, agent), limit=SOON)
    assert watchdog not in processes(bench, "alpha", WATCHDOG)


def test_where_ptrace_is_refused_two_watchdogs_restart_each_other_and_end_the_guest(
    pair: Bench,
) -> None:
    _without_ptrace(pair, "alpha")
    pair.guest(**PREPARED)  # without ptrace, memory is compared
    done = pair.good("protect", "web1", "--to", "beta", "--interval", "200ms", "--failover",
                     "automatic", "--ttl", "10s")  # fmt: skip
    told = " ".join(done.out.split())
    assert (
        "the guest's lease is enforced by two watchdogs that restart each other (not by the" in told
    )
    assert "the kernel does not permit tracing it" in told
    for which in (0, 1):
        epochs(pair)
        until(lambda: len(processes(pair, "alpha", WATCHDOG)) == 2, limit=SOON)
        _killed_with_agent(pair, _pair(pair)[which])
    assert pair.where() == ["alpha"]
    epochs(pair)
    # No agent can renew the lease: the watchdog that is left ends the guest with it.
    network.cut(pair.plan, "alpha")
    os.kill(_pair(pair)[0], signal.SIGKILL)
    signalled(pair, "alpha", AGENT, signal.SIGKILL)
    until(lambda: inject.qemu(pair.plan, "web1", "alpha") is None, limit=SOON)
    network.heal(pair.plan, "alpha")
    until(lambda: pair.where() == ["beta"], limit=SOON)
    assert "the watchdog killed the guest" in ours(pair)["why"]
    assert pair.ledgers() == WHOLE
