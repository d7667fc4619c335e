import json
from dataclasses import replace

import pytest

from tests.support.builders import sample
from tests.support.paths import TRACES
from tests.support.worlds import terms
from vmckpt.errors import BadInput
from vmckpt.migration import replay as migration_replay
from vmckpt.migration.replay import fitted, replay
from vmckpt.model.migration import Decision, JobPhase, JobSample, Mode
from vmckpt.policy import loader
from vmckpt.policy.model import RaiseDowntime, Rule, RuleCondition, StartPostcopy
from vmckpt.units import MIB, Seconds

BEGAN = Seconds(100.0)
RATE = 50
# Of what was written, pass 2 begins with that much, and so does each later one.
SET = 100


def trace(passes: int = 4) -> list[JobSample]:
    """200 MiB, then a working set of 100 MiB again and again, over 50 MiB/s; every 0.5 s."""
    found, now, sent = [], 0.5, 0
    for number in range(1, passes + 1):
        size = 200 if number == 1 else SET + 15
        while size > 15:
            found.append(
                sample(
                    BEGAN + now, iteration=number, remaining=size * MIB, transferred=sent * MIB,
                    bandwidth=RATE * MIB,
                )
            )  # fmt: skip
            size, sent, now = size - RATE // 2, sent + RATE // 2, now + 0.5
    return found


SWITCH = Rule(name="switch", when=RuleCondition(iteration=3), do=StartPostcopy())
LONGER = Rule(
    name="longer",
    when=RuleCondition(iteration=2),
    do=RaiseDowntime(by=Seconds(3.0), to=Seconds(5.0)),
)


def test_a_policy_that_would_have_done_the_same_differs_nowhere() -> None:
    found = replay(trace(), [], terms(), BEGAN)

    assert found.differs_at is None
    assert found.decided == ()
    assert found.then is None


def test_the_first_difference_is_found_and_played_on_from() -> None:
    found = replay(trace(), [], terms(SWITCH, mode=Mode.HYBRID), BEGAN)

    assert [one.action for one in found.decided] == ["switch to post-copy"]
    third = next(one for one in trace() if one.iteration == 3)
    assert found.differs_at == pytest.approx(third.at - BEGAN)
    assert found.recorded is None
    assert found.then is not None
    assert found.then.switched
    # What was left and what was written in half a second at most, over the same link.
    assert found.then.total == pytest.approx(third.at - BEGAN + (SET + 15) / RATE, rel=0.2)


def test_what_was_done_likewise_is_no_difference() -> None:
    second = next(one for one in trace() if one.iteration == 2)
    done = Decision(
        at=Seconds(second.at + 0.1), action="allow 3.3 s of downtime", reason="", rule="longer"
    )

    both = replay(trace(2), [done], terms(LONGER), BEGAN)
    observed = replay(trace(2), [replace(done, acted=False)], terms(LONGER), BEGAN)

    assert both.differs_at is None
    assert [one.rule for one in both.decided] == ["longer"]
    assert observed.differs_at is not None
    assert observed.then is not None
    assert observed.then.completed


def test_what_was_done_and_would_not_have_been_is_a_difference() -> None:
    second = next(one for one in trace() if one.iteration == 2)
    done = Decision(at=second.at, action="switch to post-copy", reason="", rule="switch")

    found = replay(trace(), [done], terms(limit=60), BEGAN)

    assert found.recorded == "switch to post-copy"
    assert found.decided == ()
    assert found.then is not None
    assert not found.then.completed
    assert found.then.total == pytest.approx(60, abs=1)


def test_the_fitted_world_is_that_of_the_trace() -> None:
    world = fitted(trace())

    assert world is not None
    assert world.bandwidth == RATE * MIB
    assert world.curve.within(4.0) == pytest.approx(SET * MIB, rel=0.1)
    assert fitted([sample(bandwidth=0)]) is None


def test_after_the_switch_nothing_is_asked() -> None:
    switched = [replace(one, phase=JobPhase.POST_COPY) for one in trace()]

    assert replay(switched, [], terms(SWITCH, mode=Mode.HYBRID), BEGAN).decided == ()


def test_the_json_form_is_plain() -> None:
    found = replay(trace(), [], terms(LONGER, limit=None), BEGAN)

    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["differs_at_ms"] is not None


def test_a_recorded_switch_that_the_policy_would_not_make_is_where_it_differs() -> None:
    """No pre-copy sample comes after it, at which it could be missed."""
    path = TRACES / "balanced-rescue.jsonl"
    told = migration_replay.replayed(path, loader.load_one("never-postcopy", None)).as_json()

    assert told["recorded"] == "switch to post-copy"
    assert told["then"]["switched"] is False
    assert any("downtime" in one["action"] for one in told["decisions"])


def test_a_policy_that_moves_by_epochs_has_nothing_to_say_of_a_recorded_migration() -> None:
    path = TRACES / "balanced-rescue.jsonl"
    with pytest.raises(BadInput, match="policy busy uses mode checkpoint"):
        migration_replay.replayed(path, loader.load_one("busy", None))
