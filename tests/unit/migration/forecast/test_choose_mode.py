import json
from dataclasses import replace

import pytest

from tests.support.worlds import policy
from vmckpt.migration.forecast.choose_mode import Measured, choose, score
from vmckpt.migration.forecast.forecast import Forecast, Range
from vmckpt.model.migration import Mode
from vmckpt.policy.model import Rule, RuleCondition, StartPostcopy
from vmckpt.units import Bytes, Seconds


def expected(
    mode: Mode, total: float | None, downtime: float | None, *, converges: bool | None = True
) -> Forecast:
    return Forecast(
        mode=mode,
        total=None if total is None else Range(0.8 * total, total),
        downtime=None if downtime is None else Range(0.8 * downtime, downtime),
        sent=Range(100, 200), converges=converges, switches=False, passes=Range(2, 3), planned=(),
        basis=(),
    )  # fmt: skip


PRE, POST, HYBRID, STOP = Mode.PRECOPY, Mode.POSTCOPY, Mode.HYBRID, Mode.STOP_AND_COPY
SWITCHES = Rule(name="switch", when=RuleCondition(iteration=2), do=StartPostcopy())

CASES = [
    # The quickest within the downtime.
    ([expected(PRE, 20, 0.3), expected(POST, 9, 0.3), expected(STOP, 5, 5)], True, POST),
    # About as quick: the gentler.
    ([expected(PRE, 9.8, 0.3), expected(POST, 9, 0.3)], True, PRE),
    # Post-copy cannot be used.
    ([expected(PRE, 20, 0.3), expected(POST, 9, 0.3)], False, PRE),
    ([expected(PRE, 40, 0.3), expected(HYBRID, 20, 0.3), expected(POST, 9, 0.3)], True, HYBRID),
    # A downtime a little above the limit is what QEMU makes of it.
    ([expected(PRE, 20, 0.42), expected(STOP, 9, 9)], True, PRE),
    # What may not complete is not chosen.
    ([expected(PRE, 5, 0.3, converges=None), expected(POST, 9, 0.3)], True, POST),
    ([expected(PRE, 60, None, converges=False), expected(STOP, 9, 0.4)], False, STOP),
    # Nothing fits: the policy's way out, where there is one.
    ([expected(PRE, 60, None, converges=False), expected(HYBRID, 9, 2)], True, HYBRID),
    ([expected(PRE, 60, None, converges=False), expected(STOP, 9, 9)], False, PRE),
    ([expected(PRE, None, None, converges=False)], False, PRE),
]


@pytest.mark.parametrize(("forecasts", "possible", "mode"), CASES)
def test_auto_comes_to(forecasts: list[Forecast], possible: bool, mode: Mode) -> None:
    chosen, reason = choose(forecasts, policy(SWITCHES), post_copy_possible=possible)

    assert chosen is mode
    assert reason


def test_hybrid_keeps_the_way_out_where_the_policy_would_take_it() -> None:
    found = [expected(PRE, 9, 0.3), expected(HYBRID, 9, 0.3)]

    assert choose(found, policy(SWITCHES), post_copy_possible=True)[0] is HYBRID
    assert choose(found, policy(), post_copy_possible=True)[0] is PRE
    assert choose(found, policy(SWITCHES), post_copy_possible=False)[0] is PRE


def test_the_waits_of_post_copy_are_no_reason_against_a_policy_that_asks_for_it() -> None:
    found = [expected(PRE, 17, 0.3), expected(HYBRID, 10, 2.0)]

    assert choose(found, policy(SWITCHES), post_copy_possible=True)[0] is HYBRID
    assert choose(found, policy(), post_copy_possible=True)[0] is PRE


def test_a_policy_without_post_copy_gets_none() -> None:
    found = [expected(PRE, 60, None, converges=False), expected(HYBRID, 9, 0.3)]

    assert choose([*found, expected(POST, 9, 0.3)], policy(), post_copy_possible=True)[0] is PRE


def test_the_reason_tells_why_nothing_fits() -> None:
    found = [expected(PRE, 60, None, converges=False), expected(STOP, 9, 9)]

    assert choose(found, policy(), post_copy_possible=False)[1] == (
        "no mode is certain to keep the downtime to 300 ms: precopy does not complete,"
        " stop-and-copy would have a downtime of 7.2 s to 9.0 s"
    )


CAME = Measured(completed=True, total=Seconds(9.0), downtime=Seconds(0.5), sent=Bytes(150))


def test_a_forecast_is_held_against_what_came() -> None:
    found = score(expected(PRE, 10, 0.3), CAME)

    assert found.total is not None
    assert found.total.covered
    assert found.total.width == pytest.approx(1 / 9)
    assert found.downtime is not None
    assert not found.downtime.covered
    assert found.converged is True
    assert json.loads(json.dumps(found.as_json()))["sent"]["covered"] is True


def test_of_a_guest_that_stayed_no_downtime_counts() -> None:
    stayed = replace(CAME, completed=False)

    assert score(expected(PRE, 10, 0.3), stayed).downtime is None
    assert score(expected(PRE, 10, 0.3), stayed).converged is False
    assert score(expected(PRE, 10, None, converges=None), stayed).converged is None
