"""What a policy's own data says of itself."""

import json

import pytest

from vmckpt.model.migration import Mode
from vmckpt.policy.model import (
    Failover,
    Keep,
    MoveLimits,
    Policy,
    Protection,
    Rule,
    RuleCondition,
    StartPostcopy,
    Strategy,
    period,
)
from vmckpt.units import Seconds

SWITCHES = Rule(name="switch", when=RuleCondition(), do=StartPostcopy())


@pytest.mark.parametrize(("time", "text"), [(5, "5s"), (900, "15min"), (86400, "1d"), (90, "90s")])
def test_periods_are_shown_as_they_are_written(time: float, text: str) -> None:
    assert period(Seconds(time)) == text


def test_what_is_kept_is_said_and_nothing_said_keeps_all() -> None:
    assert str(Keep(last=3, daily=7)) == "3 last, 7 daily"
    assert not Keep(monthly=1).nothing_said
    assert Keep().nothing_said
    assert str(Keep()) == "all"


def test_a_protection_s_terms_are_the_same_after_the_journal() -> None:
    made = Protection(interval=Seconds(0.2), failover=Failover.AUTOMATIC, lease=Seconds(9.0))

    assert Protection.from_json(json.loads(json.dumps(made.as_json()))) == made
    with pytest.raises(ValueError, match="perhaps"):
        Protection.from_json({**made.as_json(), "failover": "perhaps"})
    with pytest.raises(TypeError):
        Protection.from_json({**made.as_json(), "more": 1})


@pytest.mark.parametrize(
    ("mode", "rules", "may"),
    [
        (Mode.PRECOPY, (), False),
        (Mode.POSTCOPY, (), True),
        (Mode.HYBRID, (SWITCHES,), True),
        (Mode.AUTO, (SWITCHES,), True),
        (Mode.AUTO, (), False),
        (Mode.STOP_AND_COPY, (), False),
    ],
)
def test_only_modes_and_rules_that_ask_for_it_switch_early(
    mode: Mode, rules: tuple[Rule, ...], may: bool
) -> None:
    limits = MoveLimits(max_downtime=Seconds(0.3))
    made = Policy(name="p", file="p.yaml", mode=mode, rules=rules, limits=limits)

    assert made.may_switch_early is may


def test_a_guest_is_stopped_only_by_strategies_that_say_so() -> None:
    assert {one for one in Strategy if one.stops} == {
        one for one in Strategy if "shutdown" in one or "suspend" in one
    }
