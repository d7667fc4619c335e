"""When a rule's conditions hold: a table for each of them."""

from typing import Any

import pytest

from tests.support.moving import on_its_way, rule, terms
from vmckpt.migration.run import actions
from vmckpt.migration.run import decide as run_decide
from vmckpt.migration.run.decide import AppliedActions, decide
from vmckpt.migration.run.progress import PassHistory
from vmckpt.policy.model import GiveUp, RuleCondition, SwitchCost
from vmckpt.units import MIB, Bytes, Seconds

DONE = AppliedActions(max_downtime=Seconds(0.1))
NOTHING = PassHistory(began=Seconds(0.0))


def why(
    when: RuleCondition, track: PassHistory, *, now: float = 9.0, limit: float | None = None
) -> str | None:
    """Why a rule with that `when` acts; None: it does not."""
    under = terms(rule(GiveUp(), when), limit=limit)
    verdict, _ = decide(under, track, DONE, now=Seconds(now), operator_stops=False)
    return None if verdict is None else verdict.reason


def s(value: float) -> Seconds:
    return Seconds(value)


FOUR = on_its_way(100, 50, 50, 50, now=9.0)
# 50 MiB take half a second; then 30 MiB are dirty again, which take 0.3 s.
THIRTY = on_its_way(100, 50, now=3.0, curve=[(0.5, 30), (2, 50)])
# Passes of 50, 30, 18, 10.8, 6.5 MiB; 10 MiB go within the limit: 50 + … are sent again.
SHRINKING = on_its_way(100, 50, now=3.0, curve=[(0.5, 30), (10, 600)])
UNMEASURED = on_its_way(100, now=3.0)
BUSY = on_its_way(100, now=0.5, curve=[(0.5, 90), (2, 100)])
PARTLY = on_its_way(100, now=0.5, curve=[(0.5, 30), (2, 40)])
LEVEL = on_its_way(100, 50, now=3.0, curve=[(0.5, 50), (2, 50)])

CASES: list[tuple[RuleCondition, PassHistory, dict[str, Any], bool]] = [
    (RuleCondition(iteration=4), FOUR, {}, True),
    (RuleCondition(iteration=5), FOUR, {}, False),
    (RuleCondition(iteration=1), NOTHING, {}, False),
    (RuleCondition(stalled_for=s(5)), FOUR, {"now": 12.0}, True),
    (RuleCondition(stalled_for=s(9)), FOUR, {"now": 12.0}, False),
    (RuleCondition(stalled_for=s(0)), on_its_way(100, 50, now=3.0), {"now": 30.0}, False),
    (RuleCondition(stalled_for=s(0)), NOTHING, {}, False),
    (RuleCondition(dirty_over_bandwidth=0.5), on_its_way(100, 50, now=3.0), {}, True),
    (RuleCondition(dirty_over_bandwidth=0.51), on_its_way(100, 50, now=3.0), {}, False),
    (RuleCondition(dirty_over_bandwidth=0.0), on_its_way(100, now=3.0), {}, False),
    (RuleCondition(precopy_excess=0.6), SHRINKING, {}, True),
    (RuleCondition(precopy_excess=0.8), SHRINKING, {}, False),
    (RuleCondition(precopy_excess=99.0), LEVEL, {}, True),
    (RuleCondition(precopy_excess=0.0), on_its_way(100, now=3.0), {}, False),
    (RuleCondition(lowest_cost=SwitchCost()), LEVEL, {}, True),
    (RuleCondition(lowest_cost=SwitchCost()), BUSY, {}, True),
    (RuleCondition(lowest_cost=SwitchCost(postcopy_time=50.0)), PARTLY, {}, False),
    (RuleCondition(lowest_cost=SwitchCost()), UNMEASURED, {}, False),
    (RuleCondition(lowest_cost=SwitchCost()), NOTHING, {}, False),
    (RuleCondition(expected_downtime_above=s(0.29)), THIRTY, {}, True),
    (RuleCondition(expected_downtime_above=s(0.31)), THIRTY, {}, False),
    (RuleCondition(expected_downtime_below=s(0.31)), THIRTY, {}, True),
    (RuleCondition(expected_downtime_below=s(0.29)), THIRTY, {}, False),
    (
        RuleCondition(expected_downtime_above=s(0.2), expected_downtime_below=s(0.4)),
        THIRTY,
        {},
        True,
    ),
    (RuleCondition(expected_downtime_above=s(0.0)), on_its_way(100, now=3.0), {}, False),
    (RuleCondition(time_used=s(9)), FOUR, {"now": 9.0}, True),
    (RuleCondition(time_used=s(9)), FOUR, {"now": 8.9}, False),
    (RuleCondition(time_share=0.8), FOUR, {"now": 8.0, "limit": 10.0}, True),
    (RuleCondition(time_share=0.8), FOUR, {"now": 7.9, "limit": 10.0}, False),
    (RuleCondition(time_share=0.8), FOUR, {"now": 1e9}, False),
    (RuleCondition(remaining_above=Bytes(50 * MIB)), FOUR, {}, True),
    (RuleCondition(remaining_above=Bytes(51 * MIB)), FOUR, {}, False),
    (RuleCondition(remaining_below=Bytes(50 * MIB)), FOUR, {}, True),
    (RuleCondition(remaining_below=Bytes(49 * MIB)), FOUR, {}, False),
    (RuleCondition(remaining_below=Bytes(99)), on_its_way(now=1.0), {}, False),
    (RuleCondition(iteration=4, remaining_below=Bytes(49 * MIB)), FOUR, {}, False),
    (RuleCondition(iteration=4, remaining_below=Bytes(50 * MIB)), FOUR, {}, True),
    (RuleCondition(), FOUR, {}, True),
]


@pytest.mark.parametrize(("when", "track", "at", "holds"), CASES)
def test_a_condition_holds_or_not(
    when: RuleCondition, track: PassHistory, at: dict[str, Any], holds: bool
) -> None:
    assert (why(when, track, **at) is not None) is holds


def test_all_that_held_is_said() -> None:
    when = RuleCondition(
        iteration=4, stalled_for=s(1), dirty_over_bandwidth=0.1, time_used=s(1),
        remaining_below=Bytes(60 * MIB),
    )  # fmt: skip

    assert why(when, FOUR, now=30.0) == (
        "pass 4 has begun, there was no progress for 26.0 s, a pass leaves 50% of what it sent,"
        " 30.0 s have elapsed, and 50 MiB remain to be sent"
    )
    assert why(RuleCondition(precopy_excess=0.1), LEVEL) == (
        "pre-copy never reaches a downtime of 100 ms"
    )
    assert why(RuleCondition(precopy_excess=0.6), SHRINKING) == (
        "completing pre-copy would resend 65% of the first pass"
    )
    assert why(RuleCondition(lowest_cost=SwitchCost()), LEVEL) == (
        "a switch now costs least: 500 ms in post-copy, 500 ms of the guest's work lost"
    )
    assert (
        why(RuleCondition(expected_downtime_above=s(0.1)), THIRTY)
        == "the expected downtime is 300 ms"
    )
    assert (
        why(RuleCondition(time_share=0.8), FOUR, now=8.0, limit=10.0)
        == "80% of the time limit is used"
    )


def test_a_raised_limit_counts_for_what_precopy_still_costs() -> None:
    under = terms(rule(GiveUp(), RuleCondition(precopy_excess=0.1)))
    raised = run_decide.after(DONE, actions.SetDowntime(s(0.5)))
    verdict, _ = decide(under, LEVEL, raised, now=s(9.0), operator_stops=False)

    assert verdict is None


def test_the_numbers_of_a_decision_are_those_it_was_made_from() -> None:
    under = terms(rule(GiveUp()))
    verdict, _ = decide(under, LEVEL, DONE, now=s(3.0), operator_stops=False)

    assert verdict is not None
    assert verdict.numbers == {
        "elapsed_s": 3.0, "iteration": 2, "remaining": 50 * MIB, "bandwidth": 100 * MIB,
        "dirty_rate": None, "dirty_over_bandwidth": 0.5, "expected_downtime_ms": 500.0,
        "max_downtime_ms": 100.0, "precopy_excess": "endless",
    }  # fmt: skip


def test_before_anything_is_known_the_numbers_are_left_open() -> None:
    verdict, _ = decide(terms(), NOTHING, DONE, now=s(1.0), operator_stops=True)

    assert verdict is not None
    assert {name for name, value in verdict.numbers.items() if value is None} == {
        "remaining", "dirty_rate", "dirty_over_bandwidth", "expected_downtime_ms", "precopy_excess",
    }  # fmt: skip
