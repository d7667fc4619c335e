"""What a chaos run is made of, when copies count as two, and what the checker finds wrong."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.model.guest import GuestState
from vmckpt.policy import parse
from vmckpt.units import Seconds, parse_rate
from vmckpt_lab.chaos import plan
from vmckpt_lab.chaos.run import Tally, replay_command
from vmckpt_lab.command_runner import LATE, Moment, Progress
from vmckpt_lab.faults.scenarios import FAULTS, Fault
from vmckpt_lab.faults.trial import Ends
from vmckpt_lab.invariants import RUNS, HostCopy, Together, truthful, violations
from vmckpt_lab.processes import QemuCopy

SEEDS = st.integers(0, 10**6)
MANY = [plan.operation(7, number) for number in range(1, 1500)]


@given(SEEDS, st.integers(1, 1000))
def test_an_operation_follows_from_seed_and_number_alone(seed: int, number: int) -> None:
    one = plan.operation(seed, number)

    assert one == plan.operation(seed, number)
    assert one.number == number
    assert one.guest in {wish.name for wish in plan.guests(seed)}
    assert one.link is None or parse_rate(one.link) > 0
    policy, problems = parse.examine(plan.policy(one), Path("chaos.yaml"))
    assert problems == ()
    assert policy is not None


def test_two_seeds_are_two_runs() -> None:
    assert [plan.operation(1, n) for n in range(1, 9)] != [
        plan.operation(2, n) for n in range(1, 9)
    ]


def test_every_fault_and_every_moment_comes() -> None:
    faults = Counter(one.fault for one in MANY)
    moments = Counter(one.moment for one in MANY)

    assert set(faults) == set(Fault) - {Fault.DISK_FULL, Fault.POSTGRES}
    assert set(moments) == set(Moment)
    assert faults[Fault.CONTROLLER_KILLED] == max(faults.values())
    assert set(FAULTS) == set(Fault)
    with_database = {plan.operation(7, n, postgres=True).fault for n in range(1, 500)}
    assert Fault.POSTGRES in with_database


def test_late_moments_are_for_the_guest_that_writes_much() -> None:
    late = [one for one in MANY if one.moment in (Moment.LATE, Moment.SWITCHOVER)]
    switched = [one for one in MANY if one.moment is Moment.POST_COPY]

    assert {(one.guest, one.mode) for one in late} == {("busy", "precopy")}
    assert {(one.guest, one.mode) for one in switched} == {("busy", "postcopy")}


@pytest.mark.parametrize(
    ("source", "further", "target"),
    [("alpha", 1, "beta"), ("alpha", 2, "gamma"), ("gamma", 1, "alpha"), ("beta", 2, "alpha")],
)
def test_a_target_is_so_many_hosts_further(source: str, further: int, target: str) -> None:
    assert plan.target(["alpha", "beta", "gamma"], source, further) == target


@pytest.mark.parametrize(
    ("fault", "moment", "hit", "ends"),
    [
        (Fault.CONTROLLER_KILLED, Moment.FIRST, True, Ends.LIVES),
        (Fault.SOURCE_OFF, Moment.FIRST, True, Ends.GONE),
        (Fault.SOURCE_OFF, Moment.FIRST, False, Ends.LIVES_OR_GONE),
        (Fault.SOURCE_OFF, Moment.CLEANUP, True, Ends.LIVES_OR_GONE),
        (Fault.TARGET_QEMU, Moment.LATE, True, Ends.LIVES),
        (Fault.TARGET_QEMU, Moment.LATE, False, Ends.LIVES_OR_GONE),
        (Fault.TARGET_OFF, Moment.POST_COPY, True, Ends.LIVES_OR_GONE),
        (Fault.TARGET_CUT, Moment.POST_COPY, True, Ends.LIVES),
    ],
)
def test_only_who_has_the_guest_may_take_it_along(
    fault: Fault, moment: Moment, hit: bool, ends: Ends
) -> None:
    one = replace(MANY[0], fault=fault, moment=moment, delay=0.0)

    assert plan.ends(one, hit=hit) is ends


def test_how_to_do_it_again_is_said() -> None:
    one = replace(MANY[0], number=12)

    assert replay_command(7, 1, one, postgres=False) == (
        "vmckpt lab chaos --seed 7 --operations 12"
    )
    assert replay_command(7, 10, one, postgres=True) == (
        "vmckpt lab chaos --seed 7 --first 10 --operations 3 --postgres"
    )


HERE, THERE = QemuCopy("web1", "alpha", 10), QemuCopy("web1", "beta", 20)
OTHER = QemuCopy("web2", "beta", 30)
STEP = RUNS + 1


def found(*readings: dict[QemuCopy, int]) -> list[str]:
    together = Together()
    for number, reading in enumerate(readings):
        together.take(reading, float(number))
    return together.seen


def test_two_copies_that_run_side_by_side_are_seen() -> None:
    both = [{HERE: n * STEP, THERE: n * STEP} for n in range(4)]

    assert len(found(*both)) == 2
    assert "web1 on alpha" in found(*both)[0]


@pytest.mark.parametrize(
    "readings",
    [
        # The switchover falls into an interval: both ran in it, one before and one after.
        [{HERE: 0, THERE: 0}, {HERE: STEP, THERE: 0}, {HERE: 2 * STEP, THERE: STEP},
         {HERE: 2 * STEP, THERE: 2 * STEP}],
        # A CPU that is only told something.
        [{HERE: n * STEP, THERE: n * RUNS} for n in range(5)],
        # Another guest.
        [{HERE: n * STEP, OTHER: n * STEP} for n in range(5)],
        # A copy that has just appeared has used its time before.
        [{HERE: 0}, {HERE: STEP, THERE: 9 * STEP}, {HERE: STEP, THERE: 10 * STEP}],
    ],
)  # fmt: skip
def test_one_copy_after_the_other_is_none_too_many(readings: list[dict[QemuCopy, int]]) -> None:
    assert found(*readings) == []


HOME = HostCopy(
    host="alpha", processes=1, state=GuestState.RUNNING, persistent=True,
    max_downtime=Seconds(0.3),
)  # fmt: skip
AWAY = HostCopy(host="beta")


def test_one_running_copy_at_home_is_right() -> None:
    assert violations([HOME, AWAY], allowed=["alpha", "beta"]) == []


@pytest.mark.parametrize(
    ("seen", "complaint"),
    [
        ([AWAY], "0 QEMU processes, on no host"),
        ([HOME, replace(HOME, host="beta")], "2 QEMU processes"),
        ([replace(HOME, host="gamma"), AWAY], "the guest is on gamma, not on alpha or beta"),
        ([replace(HOME, state=GuestState.PAUSED), AWAY], "reports the guest as paused"),
        ([replace(HOME, in_parts=True), AWAY], "part of the guest's memory is not on alpha"),
        ([replace(HOME, persistent=False), AWAY], "the guest is running but not defined on alpha"),
        ([replace(HOME, job="outgoing migration"), AWAY], "the guest has a job on alpha"),
        ([replace(HOME, max_downtime=Seconds(10.0)), AWAY], "downtime limit is 10 s"),
        ([HOME, replace(AWAY, state=GuestState.SHUT_OFF)], "still defined on beta"),
        ([HOME, replace(AWAY, state=GuestState.PAUSED)], "but has no QEMU process"),
        ([HOME, replace(AWAY, files=("/run/web1.pid",))], "left on beta: /run/web1.pid"),
        ([HOME, replace(AWAY, error="no route")], "beta does not answer: no route"),
    ],
)
def test_what_is_wrong_with_a_guest_is_said(seen: list[HostCopy], complaint: str) -> None:
    wrong = violations(seen, allowed=["alpha", "beta"])

    assert len(wrong) == 1
    assert complaint in wrong[0]


@pytest.mark.parametrize(
    ("outcome", "places", "true"),
    [
        ("completed", ["beta"], True),
        ("completed", ["alpha"], False),
        ("completed", [], False),
        ("failed", ["alpha"], True),
        ("failed", ["beta"], False),
        ("cancelled", ["alpha", "beta"], False),
        ("shut-off", [], True),
        ("lost", [], True),
        ("lost", ["beta"], False),
        ("unknown", ["beta"], True),
        ("blocked", [], True),
        (None, ["alpha"], True),
    ],
)
def test_a_report_is_held_against_where_the_guest_is(
    outcome: str | None, places: list[str], true: bool
) -> None:
    assert (truthful(outcome, places, source="alpha", target="beta") is None) is true


def test_a_controller_is_where_it_last_said() -> None:
    said = [Progress()]
    for line in (
        "    0.0s phase=preflight", "    1.0s phase=setup", "    1.4s phase=pre-copy",
        "    1.4s pre-copy iteration=1 remaining=5 MiB", f"    2.4s pre-copy iteration={LATE}",
        "    2.5s phase=switchover",
    ):  # fmt: skip
        said.append(said[-1].after(line))
    at = [[moment for moment in Moment if one.is_at(moment)] for one in said]

    assert at == [
        [], [Moment.PREFLIGHT], [Moment.SETUP], [Moment.FIRST], [Moment.FIRST], [Moment.LATE],
        [Moment.SWITCHOVER],
    ]  # fmt: skip


def test_troubles_are_counted_by_their_kind() -> None:
    tally = Tally(seed=1)
    tally.blame(["memory ledger: 3 wrong", "a runs, and so does b", "m-1 is still active", "rest"])

    counted = tally.ledgers_lost, tally.two_copies_seen, tally.unknown_states_left
    assert (*counted, tally.other_troubles) == (1, 1, 1, 1)


def test_a_broken_history_is_counted_as_one_whatever_it_says() -> None:
    tally = Tally(seed=1)
    tally.blame(["history: run 1 is not linearizable; see the ledger of /var/tmp/x"])

    assert (tally.histories_broken, tally.ledgers_lost, tally.other_troubles) == (1, 0, 0)


def test_a_tally_is_json() -> None:
    tally = Tally(seed=1)
    tally.faults[Fault.POSTGRES] += 1
    told = json.loads(json.dumps(tally.as_json()))

    assert told["faults"] == {"postgresql-restarted": 1}
    assert (told["seed"], told["operations"], told["failed"]) == (1, 0, None)
