import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.snapshot.interval import PRIOR, between_failures, pace
from vmckpt.units import Seconds

DAY = 86400.0
LEAST, MOST = Seconds(1e-9), Seconds(1e12)


def interval(cost: float, between: float) -> float:
    return pace(Seconds(cost), Seconds(between), least=LEAST, most=MOST).interval


@pytest.mark.parametrize(
    ("cost", "between", "expected"),
    [
        pytest.param(0.5, 30 * DAY, math.sqrt(2 * 0.5 * 30 * DAY), id="Young"),
        pytest.param(600, DAY, 9786.27, id="Daly"),
        pytest.param(2.0, 1.0, 1.0, id="costs as much as two failures"),
        pytest.param(50.0, 1.0, 1.0, id="hopeless"),
    ],
)
def test_the_interval_is_that_of_the_formulas(cost: float, between: float, expected: float) -> None:
    assert interval(cost, between) == pytest.approx(expected, rel=1e-4)


@given(st.floats(1e-3, 1e3), st.floats(10, 1e8))
def test_no_other_interval_loses_much_less(cost: float, between: float) -> None:
    """Against the exact expectation for failures that come at random: M (e^((t+C)/M) - 1) / t."""
    if cost > between / 2:
        return

    def takes(work: float) -> float:
        return math.expm1(min((work + cost) / between, 600)) * between / work

    best = interval(cost, between)
    others = [takes(best * factor) for factor in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert takes(best) <= min(others) * 1.005


def test_bounds_hold_and_are_told() -> None:
    def within(least: float, most: float) -> tuple[float, str]:
        found = pace(Seconds(0.5), Seconds(DAY), least=Seconds(least), most=Seconds(most))
        return found.interval, found.reason

    assert within(600, 1200) == (600, within(600, 1200)[1])
    assert "; at least 10 min 00 s; about" in within(600, 1200)[1]
    assert within(1, 60)[0] == 60
    assert "; at most 60.0 s; about" in within(1, 60)[1]
    assert "at " not in within(1, 1200)[1]


def test_the_arithmetic_is_shown() -> None:
    young = pace(Seconds(0.5), Seconds(30 * DAY), least=LEAST, most=MOST)
    daly = pace(Seconds(600), Seconds(DAY), least=LEAST, most=MOST)

    assert young.reason == (
        "C = 500 ms, M = 30.0 days: sqrt(2CM) = 26 min 50 s (Young);"
        " about 0.062 % of the guest's work is lost"
    )
    assert daly.reason.startswith(
        "C = 10 min 00 s, M = 24 h 00 min: sqrt(2CM)(1 + sqrt(C/2M)/3 + (C/2M)/9) - C = 2 h 49 min"
    )
    assert young.lost == pytest.approx(0.00062, rel=0.01)


def test_without_failures_the_longest_interval_is_taken() -> None:
    found = pace(Seconds(1), Seconds(math.inf), least=LEAST, most=Seconds(3600))

    assert found.interval == Seconds(3600)
    assert "no failures, so no snapshots" in found.reason


def test_what_costs_nothing_is_done_as_often_as_may_be() -> None:
    assert pace(Seconds(0), Seconds(DAY), least=Seconds(15), most=MOST).interval == Seconds(15)


@pytest.mark.parametrize(
    ("cost", "between", "least", "most"),
    [(-1, 1, 1, 1), (math.inf, 1, 1, 1), (math.nan, 1, 1, 1), (1, 0, 1, 1), (1, math.nan, 1, 1),
     (1, 1, 0, 1), (1, 1, 2, 1), (1, 1, math.nan, 1)],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(
    cost: float, between: float, least: float, most: float
) -> None:
    with pytest.raises(ValueError, match="cost"):
        pace(Seconds(cost), Seconds(between), least=Seconds(least), most=Seconds(most))


@given(st.floats(1e-6, 1e9), st.floats(1e-3, 1e9))
def test_there_is_always_an_interval_within_bounds(cost: float, between: float) -> None:
    found = pace(Seconds(cost), Seconds(between), least=Seconds(1), most=Seconds(1e6))

    assert 1 <= found.interval <= 1e6
    assert 0 <= found.lost <= 1


def test_the_time_between_failures_is_told_from_few_of_them() -> None:
    assert between_failures(Seconds(0), 0)[0] == PRIOR
    assert between_failures(Seconds(60 * DAY), 2)[0] == 30 * DAY
    assert between_failures(Seconds(330 * DAY), 0)[0] == 360 * DAY
    assert between_failures(Seconds(60 * DAY), 1)[1] == (
        "M = (60.0 days observed + 30.0 days) / (1 failure + 1) = 45.0 days"
    )
    with pytest.raises(ValueError, match=r"-1 s observed, 0 failures, prior 2592000\.0 s"):
        between_failures(Seconds(-1), 0)
