"""The campaign of faults: what its seeds are made of, its points, and what it takes for two."""

import importlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench import faults_plan, points, replication_faults
from bench.faults_checks import Speakers, counted
from bench.faults_plan import CLOCKS, HOST_INJURIES, LINKS, STEPS, How, Kind, Victim, round_of
from tests.support.paths import ROOT

ROUNDS = [round_of(seed) for seed in range(1, 301)]


def test_a_seed_is_always_the_same_round() -> None:
    assert [round_of(seed) for seed in range(1, 301)] == ROUNDS
    assert len({str(one) for one in ROUNDS}) == 300


def test_300_rounds_have_every_step_and_every_subset_with_every_signal() -> None:
    signals = [one for one in ROUNDS if one.kind is Kind.SIGNALS]
    whole = {frozenset(some) for step in STEPS for some in faults_plan.subsets(step)}

    assert {one.step for one in signals} == set(STEPS)
    assert {frozenset(one.victims) for one in signals} == whole
    assert {one.how for one in signals} == set(How)
    assert all(set(one.victims) <= set(faults_plan.there(one.step)) for one in signals)


def test_300_rounds_have_all_other_faults() -> None:
    assert {one.link for one in ROUNDS} == {None, *LINKS}
    assert {one.injury for one in ROUNDS} == {None, *HOST_INJURIES}
    assert {one.clock for one in ROUNDS} == {None, *CLOCKS}
    assert {one.jump for one in ROUNDS} == {0, 3600, -3600}
    assert {one.plugs for one in ROUNDS} == {None, True, False}
    counts = Counter(one.kind for one in ROUNDS)
    assert set(counts) == set(Kind)
    assert counts[Kind.SIGNALS] > 150


def test_a_protection_has_no_undo_process_and_a_backup_no_disk_log() -> None:
    assert Victim.UNDO in faults_plan.there("capturing")
    assert Victim.UNDO not in faults_plan.there("paused")
    assert len(faults_plan.subsets("paused")) == 15
    assert Victim.DISK_LOG not in faults_plan.there("committed")
    assert len(faults_plan.subsets("committed")) == 7


def test_a_kind_can_be_chosen() -> None:
    assert {round_of(seed, Kind.CARD).kind for seed in range(9)} == {Kind.CARD}


def test_every_step_is_a_point_and_every_point_is_a_function_of_the_product() -> None:
    assert set(points.POINTS) == set(STEPS)
    for point in points.POINTS.values():
        owner, name = points.owner_of(importlib.import_module(point.module), point.name)
        assert callable(vars(owner)[name]), point


def test_a_process_stops_where_it_is_armed_and_goes_on(tmp_path: Path) -> None:
    armed = tmp_path / "at"
    armed.write_text("taken over")
    program = (
        "import pathlib, sys; from vmckpt.replication.backup import standby_setup;"
        "import types; one = types.SimpleNamespace(disks=[]);"
        "folder = pathlib.Path(sys.argv[1]);"
        "standby_setup.adopt(one, folder); standby_setup.adopt(one, folder); print('over')"
    )
    environ = {
        **os.environ, points.VARIABLE: str(armed), "PYTHONPATH": f"{ROOT}/bench/stopping:{ROOT}",
    }  # fmt: skip
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as running:
        stopped, status = os.waitpid(running.pid, os.WUNTRACED)
        assert (stopped, os.WIFSTOPPED(status)) == (running.pid, True)
        assert (tmp_path / "ours").exists()
        assert armed.with_name("at.stopped").read_text() == str(running.pid)
        assert not armed.exists()
        os.kill(running.pid, 18)
        out, _ = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, "over\n")


def test_a_process_sees_its_wall_clock_jump(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    program = (
        "import pathlib, sys, time; before = time.time(), time.monotonic();"
        "pathlib.Path(sys.argv[1]).write_text('-3600'); after = time.time(), time.monotonic();"
        "print(round(after[0] - before[0], -1), round(after[1] - before[1]))"
    )
    environ = {
        **os.environ, points.CLOCK: str(clock), "PYTHONPATH": f"{ROOT}/bench/stopping:{ROOT}",
    }  # fmt: skip
    command = [sys.executable, "-c", program, str(clock)]
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert told.stdout == "-3600.0 0\n"


def test_without_the_variable_nothing_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(points.VARIABLE, raising=False)
    before = list(sys.meta_path)
    points.install()
    assert sys.meta_path == before


def test_two_hosts_that_speak_at_once_are_told_and_one_after_the_other_is_not() -> None:
    speakers = Speakers()
    for at, (alpha, beta) in enumerate([(1, 0), (2, 0), (3, 1), (3, 2), (3, 3)]):
        speakers.take({("alpha", "vnet0"): alpha, ("beta", "vnet1"): beta}, float(at))
    assert speakers.seen == []
    assert speakers.packets == {"alpha": 2, "beta": 3}
    for at, (alpha, beta) in enumerate([(4, 4), (5, 5), (6, 5)]):
        speakers.take({("alpha", "vnet0"): alpha, ("beta", "vnet1"): beta}, float(at))
    assert speakers.seen == ["at 1.00: guests speak on alpha and beta"]


def test_a_tap_that_comes_or_goes_is_no_speaker() -> None:
    speakers = Speakers()
    for taps in ({("alpha", "vnet0"): 9}, {("beta", "vnet0"): 7}, {("alpha", "vnet2"): 90}):
        speakers.take(taps, 0.0)
    assert (speakers.seen, speakers.packets) == ([], {})


def test_what_taps_took_is_read_from_the_kernels_table() -> None:
    table = (
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo:  100       3    0    0    0     0          0         0      100       3\n"
        " vnet2: 3000      42    0    0    0     0          0         0     9000      77\n"
    )
    assert counted(table) == {"vnet2": 42}


def test_a_summary_counts_what_was_struck() -> None:
    row = {
        "seed": 1, "kind": "signals", "step": "paused", "victims": ["agent"], "how": "SIGKILL",
        "hit": True, "home": ["alpha", "beta"], "gone": False, "behind_s": 0.2, "needed": "nothing",
        "took_s": 2.0,
    }  # fmt: skip
    told = replication_faults.summary([row, {**row, "seed": 2, "violations": ["two"]}], 3.0)

    assert (told["rounds"], told["violations"], told["failovers"]) == (2, 1, 1)
    assert told["by_victims"] == {"agent": 2}
    assert told["seeds"] == [1, 2]
