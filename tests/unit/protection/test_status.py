"""What a watched protection says when, told as stories of one look a second."""

import math
from dataclasses import replace
from typing import Any

import pytest

from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.status import (
    SUMMARY_EVERY,
    Because,
    Look,
    is_notable,
    parse_status,
    readiness,
)
from vmckpt.units import Seconds

WORKS: dict[str, Any] = {
    "role": "primary", "phase": "protecting", "epoch": 7, "rpo_s": 0.12, "interval_s": 0.1,
    "interval_why": "as asked for", "median": {"pause_s": 0.02}, "output_delay_s": 0.09,
    "packets_lost": 0, "standby": {"ready": True},
}  # fmt: skip
STANDS: dict[str, Any] = {"role": "backup", "runs": True, "ready": True, "says": "it follows"}
GOOD = Look(
    phase="protecting", ready=True, ready_why="it follows", in_the_way=None, epoch=7,
    behind_s=0.12, pause_s=0.02, interval_s=0.1, interval_why="as asked for", output_delay_s=0.09,
    packets_lost=0, end=None,
)  # fmt: skip


def entry(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> dict[str, Any]:
    says = {"alpha": ours, "beta": theirs}
    return {"guest": "web1", "primary": "alpha", "backup": "beta", "says": says}


def story(*looks: Look) -> list[tuple[int, tuple[Because, ...]]]:
    """Looks a second apart: which are told, and why."""
    told: list[tuple[int, tuple[Because, ...]]] = []
    last, at = None, 0
    for second, one in enumerate(looks):
        because = is_notable(last, Seconds(second - at), one)
        if because:
            told.append((second, because))
            last, at = one, second
    return told


def test_one_that_works_says_so_and_then_every_ten_seconds() -> None:
    looks = [replace(GOOD, epoch=10 * n, behind_s=0.01 * n) for n in range(25)]

    assert math.isclose(SUMMARY_EVERY, 10.0)
    assert story(*looks) == [
        (0, (Because.FIRST,)), (10, (Because.TIME,)), (20, (Because.TIME,)),
    ]  # fmt: skip


def test_a_backup_that_is_lost_and_comes_back_is_told_step_by_step() -> None:
    cut = replace(GOOD, in_the_way="the connection broke")
    alone = replace(cut, phase="alone", ready=False, ready_why="the guest runs without it")
    copies = replace(alone, phase="copying", in_the_way=None, ready_why="synchronising")

    assert story(GOOD, cut, cut, cut, alone, alone, copies, copies, GOOD) == [
        (0, (Because.FIRST,)),
        (1, (Because.IN_THE_WAY,)),
        (4, (Because.PHASE, Because.STANDBY)),
        (6, (Because.PHASE, Because.STANDBY, Because.IN_THE_WAY)),
        (8, (Because.PHASE, Because.STANDBY)),
    ]


def test_a_reason_with_other_numbers_is_the_same_reason() -> None:
    looks = [replace(GOOD, ready_why=f"the lease runs for {4 - n / 3:.2f} s") for n in range(5)]

    assert [second for second, _ in story(*looks)] == [0]


def test_an_interval_is_told_when_it_changed_by_a_quarter_since_it_was_told() -> None:
    looks = [replace(GOOD, interval_s=one) for one in (0.1, 0.11, 0.12, 0.13, 0.14, 0.1, 0.09)]

    assert story(*looks) == [
        (0, (Because.FIRST,)), (3, (Because.INTERVAL,)),
        (6, (Because.INTERVAL,)),
    ]  # fmt: skip
    assert is_notable(replace(GOOD, interval_s=None), Seconds(0.1), GOOD) == (Because.INTERVAL,)


def test_packets_that_were_lost_are_told_at_once() -> None:
    looks = [replace(GOOD, packets_lost=one) for one in (0, 0, 40_000, 40_000)]

    assert story(*looks)[1:] == [(2, (Because.LOST,))]


def test_its_end_is_told_whatever_else_there_is() -> None:
    over = replace(GOOD, end="the guest runs on beta")

    assert is_notable(GOOD, Seconds(0.1), over) == (Because.END,)


def test_what_both_agents_say_becomes_one_look() -> None:
    assert parse_status(entry(WORKS, STANDS)) == GOOD


def test_alone_nothing_can_be_gone_on_from_however_ready_the_standby_thinks_it_is() -> None:
    found = parse_status(entry({**WORKS, "phase": "alone", "says": "no room"}, STANDS))

    assert (found.ready, found.behind_s) == (False, None)
    assert found.ready_why == "the guest is running unprotected, so its standby is outdated"
    assert found.in_the_way == "no room"


@pytest.mark.parametrize(
    ("ours", "theirs", "ready", "why"),
    [
        (WORKS, STANDS, True, "it follows"),
        (WORKS, {**STANDS, "ready": False, "says": "synchronising"}, False, "synchronising"),
        (WORKS, {"error": "beta: no answer"}, True, "cannot be queried: beta: no answer"),
        ({**WORKS, "phase": "copying"}, {"error": "beta: no answer"}, False, "cannot be queried"),
        ({"error": "alpha: no answer"}, STANDS, True, "it follows"),
        (WORKS, {}, False, "then vmckpt protect"),
        (WORKS, {**STANDS, "runs": False, "agent": False}, False, "its QEMU is gone"),
        (WORKS, {"outcome": "failed-over", "runs": True}, False, "is running there"),
    ],
)
def test_whether_the_standby_can_take_over(
    ours: dict[str, Any], theirs: dict[str, Any], ready: bool, why: str
) -> None:
    found, told = readiness(parse_answer(ours), parse_answer(theirs))

    assert found is ready
    assert why in told


@pytest.mark.parametrize(
    ("ours", "theirs", "phase", "end"),
    [
        ({"outcome": "ended", "why": "shut down"}, STANDS, "ended", "shut down"),
        ({"outcome": "switched", "why": "it runs on beta"}, STANDS, "switched", None),
        ({"outcome": "died", "why": "the guard ended it"}, STANDS, "died", None),
        ({"error": "no answer"}, {"outcome": "failed-over", "why": "silent"}, "failed-over",
         "failed over; the guest is running on beta, unprotected: silent"),
        ({"outcome": "died"}, {"outcome": "failed-over", "why": "silent", "runs": False},
         "failed-over", "failed over; the guest is no longer running on beta: silent"),
        (None, None, "unknown", None),
    ],
)  # fmt: skip
def test_when_it_is_over(
    ours: dict[str, Any] | None, theirs: dict[str, Any] | None, phase: str, end: str | None
) -> None:
    found = parse_status(entry(ours, theirs))

    assert (found.phase, found.end) == (phase, end)


OVER = {"outcome": "failed-over", "why": "silent", "at": 1_700_000_000.0, "runs": True}


@pytest.mark.parametrize(
    ("ours", "theirs", "automatic", "then"),
    [
        (WORKS, STANDS, True, None),
        ({"error": "alpha: no answer"}, OVER, True,
         "run vmckpt recover; once alpha is up again, run vmckpt protect web1 --reverse"),
        ({"outcome": "died", "role": "primary"}, OVER, True,
         "run vmckpt recover, then vmckpt protect web1 --reverse"),
        ({**WORKS, "runs": True}, OVER, True, "run vmckpt recover"),
        ({"outcome": "ended", "why": "it shut down"}, STANDS, True, "run vmckpt recover"),
        ({"outcome": "died"}, STANDS, False, "run vmckpt failover web1"),
        ({"outcome": "died"}, STANDS, True, None),
        ({"outcome": "died"}, {**STANDS, "ready": False}, False, None),
    ],
)  # fmt: skip
def test_the_next_step(
    ours: dict[str, Any], theirs: dict[str, Any], automatic: bool, then: str | None
) -> None:
    found = parse_status({**entry(ours, theirs), "automatic": automatic})

    assert found.next_step == then


@pytest.mark.parametrize(
    ("at", "says"), [(1_700_000_000.0, "at 2023-11-1"), (-1, "over;"), (1e18, "over;")]
)
def test_a_failover_is_told_with_its_time_and_without_the_former_hosts_errors(
    at: float, says: str
) -> None:
    found = parse_status(entry({"error": "alpha: no answer"}, {**OVER, "at": at}))

    assert says in str(found.end)
    assert (found.phase, found.ready, found.in_the_way) == ("failed-over", False, None)


def test_what_became_of_a_guest_is_in_the_way() -> None:
    died = {"outcome": "died", "why": "the guard ended the guest: the lease has ended"}

    assert parse_status(entry(died, STANDS)).in_the_way == died["why"]
