"""What a guard decides, and what it does with real processes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.guards import RULES, Bench, dead, folder, until
from vmckpt.lease.clock import boottime
from vmckpt.replication import priority
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog import shared_page
from vmckpt.replication.watchdog.facts import Facts
from vmckpt.replication.watchdog.process import WatchdogFailed
from vmckpt.replication.watchdog.rules import (
    TURN,
    End,
    KillAgent,
    KillGuest,
    ResumeGuest,
    Rules,
    StartAgent,
    Wait,
    WatchdogFacts,
    decide,
)
from vmckpt.units import Seconds

__all__ = ["folder"]

NOW = 1000.0
# A guard needs a fifth of it; the test itself, which looks, may be kept waiting.
PROMPT = 0.1 + 0.15
WELL = WatchdogFacts(
    guest_lives=True, gone=0.0, over=False, renewed=NOW - 1, lasts=4.0, stopped=0, agent_lives=True,
    agent_since=NOW - 100, came=NOW - 99, spoke=NOW - 0.1, started=None, woke=NOW - 500,
    resumable=True, resuming=False, resumed=None,
)  # fmt: skip

GONE = {"guest_lives": False, "gone": NOW - 1}


def test_where_all_is_well_it_waits_for_a_turn_or_for_the_end_of_the_lease() -> None:
    assert decide(WELL, NOW, RULES) == Wait(NOW + TURN)
    assert decide(replace(WELL, renewed=NOW - 3.99), NOW, RULES) == Wait(NOW - 3.99 + 4.0)
    assert decide(replace(WELL, renewed=0), NOW, RULES) == Wait(NOW + TURN)


@pytest.mark.parametrize(
    ("seen", "action"),
    [
        pytest.param({"renewed": NOW - 4.01}, KillGuest, id="the lease has ended"),
        pytest.param({"renewed": NOW - 3.99}, Wait, id="it has not"),
        pytest.param({"renewed": float("-inf")}, KillGuest, id="it is lost"),
        pytest.param({"renewed": float("nan")}, KillGuest, id="no number"),
        pytest.param({"lasts": float("nan")}, KillGuest, id="no number either"),
        pytest.param({"renewed": NOW - 10, "over": True}, End, id="the protection has ended"),
        pytest.param({**GONE, "renewed": NOW - 10}, Wait, id="the agent leaves word"),
        pytest.param({**GONE, "agent_lives": False}, StartAgent, id="nobody does"),
        pytest.param({**GONE, "stopped": NOW - 9, "spoke": NOW - 9}, Wait, id="busy with it"),
        pytest.param({**GONE, "gone": NOW - 61}, End, id="and does not come to an end"),
        pytest.param({**GONE, "over": True}, End, id="it has"),
        pytest.param({"renewed": NOW - 10, "agent_lives": False}, KillGuest, id="both gone"),
        pytest.param({"renewed": NOW - 10, "stopped": NOW - 9}, KillGuest, id="lease before agent"),
        pytest.param({"renewed": NOW - 10, "woke": NOW}, KillGuest, id="both were frozen"),
        pytest.param({"stopped": NOW - 1.1}, KillAgent, id="it stands still"),
        pytest.param({"stopped": NOW - 0.9}, Wait, id="for an epoch"),
        pytest.param({"stopped": NOW - 9, "woke": NOW - 0.5}, Wait, id="the machine was frozen"),
        pytest.param({"stopped": NOW - 9, "woke": NOW - 1.5}, KillAgent, id="and is no more"),
        pytest.param({"stopped": NOW - 9, "came": NOW - 4}, Wait, id="left by another"),
        pytest.param({"stopped": NOW - 9, "came": NOW - 6}, KillAgent, id="not undone"),
        pytest.param({"spoke": NOW - 2.1}, KillAgent, id="silent"),
        pytest.param({"spoke": 0}, Wait, id="never spoke"),
        pytest.param({"spoke": NOW - 90, "came": NOW - 50}, Wait, id="another's beats"),
        pytest.param({"spoke": NOW - 90, "came": NOW - 61}, KillAgent, id="and none of its own"),
        pytest.param({"came": 0, "agent_since": NOW - 50}, Wait, id="still starting"),
        pytest.param({"came": 0, "spoke": NOW - 50, "agent_since": NOW - 49}, Wait, id="silently"),
        pytest.param({"came": 0, "agent_since": NOW - 61}, KillAgent, id="for a minute"),
        pytest.param(
            {"came": 0, "agent_since": NOW - 61, "woke": NOW - 50}, Wait, id="most of it frozen"
        ),
        pytest.param({"stopped": NOW - 0.1, "agent_lives": False}, ResumeGuest, id="left paused"),
        pytest.param(
            {"stopped": NOW - 0.1, "agent_lives": False, "resumable": False},
            StartAgent,
            id="a standby",
        ),
        pytest.param(
            {"stopped": NOW - 0.1, "agent_lives": False, "resuming": True, "resumed": NOW - 0.1},
            Wait,
            id="that is under way",
        ),
        pytest.param(
            {"stopped": NOW - 0.5, "agent_lives": False, "resumed": NOW - 0.4},
            StartAgent,
            id="and has failed",
        ),
        pytest.param(
            {"stopped": NOW - 2, "came": 0, "agent_since": NOW - 1.5, "resumed": NOW - 1},
            ResumeGuest,
            id="once more while it starts",
        ),
        pytest.param(
            {"stopped": NOW - 2, "came": 0, "agent_since": NOW - 1.5, "resumed": NOW - 0.9},
            Wait,
            id="not yet",
        ),
        pytest.param(
            {"stopped": NOW - 0.1, "agent_lives": False, "resumed": NOW - 0.3},
            ResumeGuest,
            id="paused anew",
        ),
        pytest.param(
            {"stopped": NOW - 0.1, "agent_lives": False, "renewed": NOW - 10},
            KillGuest,
            id="its lease has ended",
        ),
        pytest.param({"agent_lives": False}, StartAgent, id="gone"),
        pytest.param({"agent_lives": False, "started": NOW - 0.9}, Wait, id="once a second"),
        pytest.param({"agent_lives": False, "started": NOW - 1}, StartAgent, id="again"),
        pytest.param({"agent_lives": False, "over": True}, End, id="gone for good"),
    ],
)
def test_it_chooses(seen: dict[str, float], action: type) -> None:
    assert isinstance(decide(replace(WELL, **seen), NOW, RULES), action)  # type: ignore[arg-type]


any_time = st.floats(allow_nan=True, allow_infinity=True)


@given(
    renewed=any_time.filter(bool), stopped=any_time, since=any_time, spoke=any_time, woke=any_time,
    started=st.none() | any_time, lives=st.booleans(),
)  # fmt: skip
def test_nothing_that_is_wrong_with_the_agent_keeps_a_guest_alive(
    renewed: float, stopped: float, since: float, spoke: float, woke: float,
    started: float | None, lives: bool,
) -> None:  # fmt: skip
    seen = replace(
        WELL, renewed=renewed, stopped=stopped, agent_since=since, spoke=spoke, woke=woke,
        started=started, agent_lives=lives,
    )  # fmt: skip
    good = renewed + seen.lasts >= NOW

    assert isinstance(decide(seen, NOW, RULES), KillGuest) is not good


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    made = Bench(folder)
    yield made
    made.close()


def test_it_kills_the_guest_when_the_lease_ends_and_tells_why(bench: Bench) -> None:
    bench.begin()
    bench.page.lasts = 0.5
    bench.page.renewed = boottime()
    for _ in range(5):  # renewed in time it runs on
        time.sleep(0.3)
        assert not dead(bench.qemu)
        bench.page.renewed = boottime()
    ends = bench.page.renewed + 0.5
    died = until(lambda: dead(bench.qemu))

    assert ends <= died < ends + PROMPT
    assert bench.qemu.returncode == -signal.SIGKILL
    until((bench.folder / watchdog_process.KILLED).exists)
    assert "valid for 0.50 s" in (bench.folder / watchdog_process.KILLED).read_text()
    (bench.folder / watchdog_process.OVER).touch()
    until(lambda: not bench.guard())
    assert "exiting: the protection has ended" in bench.log()


def test_a_stopped_agent_saves_nobody(bench: Bench) -> None:
    bench.begin()
    bench.page.lasts = 0.3
    bench.page.renewed = boottime()
    bench.agent.send_signal(signal.SIGSTOP)
    ends = bench.page.renewed + 0.3

    assert until(lambda: dead(bench.qemu)) < ends + PROMPT


def test_a_lease_that_is_lost_ends_the_guest_at_once(bench: Bench) -> None:
    bench.begin()
    bench.page.renewed = boottime()
    bench.page.lose()
    lost = boottime()

    assert until(lambda: dead(bench.qemu)) < lost + PROMPT
    until((bench.folder / watchdog_process.KILLED).exists)
    assert "does not grant it to this host" in (bench.folder / watchdog_process.KILLED).read_text()


def test_after_a_frozen_machine_the_guest_dies_at_once(bench: Bench) -> None:
    number = bench.begin()
    bench.page.lasts = 0.4
    bench.page.renewed = boottime()
    for process in (number, bench.agent.pid):
        os.kill(process, signal.SIGSTOP)
    time.sleep(0.7)
    assert not dead(bench.qemu)
    for process in (bench.agent.pid, number):
        os.kill(process, signal.SIGCONT)
    thawed = boottime()

    assert until(lambda: dead(bench.qemu)) < thawed + PROMPT


def test_an_agent_that_was_killed_is_started_again_and_for_how_long_the_guest_lives(
    bench: Bench,
) -> None:
    bench.begin()
    bench.agent.kill()
    killed = boottime()
    assert until(lambda: len(bench.agents()) == 1) < killed + 0.5
    first = bench.agents()[0]
    bench.page.agent = shared_page.identity(first)
    time.sleep(0.2)
    os.kill(first, signal.SIGKILL)
    again = until(lambda: len(bench.agents()) == 2)

    assert again > killed + 0.9  # at most once a second
    second = Path(f"/proc/{bench.agents()[1]}")
    assert os.getsid(int(second.name)) == int(second.name)
    assert (second / "oom_score_adj").read_text() == "0\n"
    assert os.sched_getscheduler(int(second.name)) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, int(second.name)) == priority.NICE
    group = second / "autogroup"
    assert not group.exists() or group.read_text().endswith(f" nice {priority.NICE}\n")
    bench.qemu.kill()
    bench.qemu.wait()
    time.sleep(1.0)
    assert bench.guard()  # somebody must leave word of how it ended
    os.kill(int(second.name), signal.SIGKILL)
    until(lambda: len(bench.agents()) == 3)
    (bench.folder / watchdog_process.OVER).touch()
    until(lambda: not bench.guard())
    os.kill(bench.agents()[2], signal.SIGKILL)
    time.sleep(0.1)
    assert len(bench.agents()) == 3


def test_what_it_runs_comes_by_a_pipe(bench: Bench) -> None:
    """No file says it, which another user could have swapped."""
    planted = json.dumps({**asdict(bench.facts), "command": ["touch", f"{bench.folder}/planted"]})
    for name in ("guard.json", "facts.json", "session.json"):
        (bench.folder / name).write_text(planted)
    number = bench.begin()
    assert b"agents" not in Path(f"/proc/{number}/cmdline").read_bytes()
    bench.agent.kill()
    until(lambda: len(bench.agents()) == 1)
    assert not (bench.folder / "planted").exists()


def test_a_guard_whose_agent_leaves_no_word_ends_all_the_same(folder: Path) -> None:
    bench = Bench(folder, rules=Rules(leaves=Seconds(0.5)))
    bench.begin()
    bench.qemu.kill()
    bench.qemu.wait()
    since = boottime()
    until(lambda: not bench.guard())
    assert since + 0.4 <= boottime() < since + 1.5
    assert "has not ended the protection" in bench.log()
    bench.close()


def test_an_agent_that_lets_the_guest_stand_still_is_replaced(bench: Bench) -> None:
    bench.begin()
    bench.page.stopped = since = boottime()
    assert since + 1 <= until(lambda: dead(bench.agent)) < since + 1.2
    assert until(bench.agents) < since + 1.5
    time.sleep(0.3)

    assert len(bench.agents()) == 1  # which has time to undo it
    assert not dead(bench.qemu)
    assert "killed the agent" in bench.log()


def test_an_agent_whose_beats_cease_is_replaced(folder: Path) -> None:
    bench = Bench(folder, rules=Rules(grace=Seconds(0.2), silence=Seconds(0.4)))
    bench.begin()
    for _ in range(8):
        bench.page.beat()
        time.sleep(0.1)
    assert not dead(bench.agent)
    until(lambda: dead(bench.agent), 1.0)
    bench.close()


def test_a_process_that_got_the_number_of_another_is_left_alone(bench: Bench) -> None:
    """Its start differs; nothing is signalled by number."""
    bench.begin()
    bystander = subprocess.Popen(["sleep", "600"])
    bench.page.agent = shared_page.identity(bystander.pid) - (1 << 22)
    bench.page.stopped = boottime()
    until(bench.agents)
    time.sleep(1.2)
    assert not dead(bystander)
    bystander.kill()
    bystander.wait()


def test_a_guest_that_is_gone_or_is_another_is_not_guarded(bench: Bench) -> None:
    facts = replace(bench.facts, qemu=bench.facts.qemu - (1 << 22))
    with pytest.raises(WatchdogFailed, match="is gone"):
        watchdog_process.start(facts)
    assert not bench.guard()


def test_the_marker_sends_it_away_and_signals_do_not(bench: Bench) -> None:
    number = bench.begin()
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(number, one)
    time.sleep(0.15)
    assert bench.guard() == number
    (bench.folder / watchdog_process.OVER).touch()
    until(lambda: not bench.guard())

    assert "exiting: the protection has ended" in bench.log()
    assert not dead(bench.qemu)
    with pytest.raises(WatchdogFailed):
        watchdog_process.start(bench.facts)


def test_there_is_one_guard_and_another_when_it_was_killed(bench: Bench) -> None:
    number = bench.begin()
    assert bench.begin() == number
    os.kill(number, signal.SIGKILL)
    until(lambda: bench.guard() != number)
    looked = bench.page.guarded
    again = bench.begin()

    assert again not in (0, number)
    assert bench.page.guarded > looked


def test_it_is_locked_in_memory_and_comes_before_others(bench: Bench) -> None:
    number = bench.begin()
    status = Path(f"/proc/{number}/status").read_text()
    locked = next(line.split()[1] for line in status.splitlines() if line.startswith("VmLck"))

    assert int(locked) > 1000
    assert os.sched_getscheduler(number) & os.SCHED_FIFO
    assert os.getsid(number) == number
    # Not every root may do this; then it is told.
    score = Path(f"/proc/{number}/oom_score_adj").read_text()
    told = "running without protection from the out-of-memory killer" in bench.log()
    assert (score == "-1000\n") is not told


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"page": 1, "command": 2}'])
def test_facts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Facts.from_json(text)
