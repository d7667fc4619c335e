import json
from dataclasses import replace

import pytest

from tests.scenarios.stories import STORIES
from tests.scenarios.story import TRACES, Decided, Story, record, replay
from vmckpt.model.migration import Mode
from vmckpt.policy import loader
from vmckpt.units import MIB

NAMES = {story.name: story for story in STORIES}


def trace(name: str) -> list[str]:
    return (TRACES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def expected(name: str) -> list[str]:
    lines = (TRACES / f"{name}.expected").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.fixture(params=STORIES, ids=lambda story: story.name)
def story(request: pytest.FixtureRequest) -> Story:
    found: Story = request.param
    return found


def test_what_is_decided_over_a_trace_is_what_is_expected(story: Story) -> None:
    judge = replay(trace(story.name), story.name)

    assert [str(one) for one in judge.decided] == expected(story.name)[:-1]


def test_the_story_made_anew_is_the_one_that_is_kept(story: Story) -> None:
    lines, decided = record(story)

    anew = "python -m tests.scenarios --regenerate makes it; look at what changed"
    assert [str(one) for one in decided] == expected(story.name), anew
    assert lines == trace(story.name), anew


def test_what_must_never_happen_does_not(story: Story) -> None:
    """Golden files can be made anew without a thought; this cannot."""
    *decided, outcome = expected(story.name)
    at = float(outcome.split()[0])

    for word in story.never:
        assert not [line for line in decided if word in line.rsplit(": ", 1)[1]]
    if story.within is None:
        assert not outcome.endswith("completed")
    else:
        assert outcome.endswith("completed")
        assert at <= story.within


def test_what_is_shown_as_done_stays_a_share(story: Story) -> None:
    judge = replay(trace(story.name), story.name)

    assert all(0 <= share <= 1 for share in judge.shares)


def test_every_shipped_policy_has_a_story() -> None:
    # Where epochs take the place of passes there is nothing to converge by rules: those have tests
    # of their own (tests/unit/protection/migration/test_switchover.py).
    told = {one.name for one in loader.load_all(None) if one.mode is not Mode.CHECKPOINT}
    assert told <= {one.policy for one in STORIES}


def test_no_file_is_left_of_a_story_that_is_gone() -> None:
    assert {path.stem for path in TRACES.iterdir()} == set(NAMES)


def test_more_is_processed_than_there_is() -> None:
    last = json.loads(trace("processed-exceeds-total")[-2])["sample"]

    assert last["transferred"] > 5 * last["total"]


def test_an_old_counter_does_not_make_the_first_pass_a_later_one() -> None:
    fresh = record(replace(NAMES["counter-not-reset"], machine=NAMES["balanced-rescue"].machine))
    judge = replay(trace("counter-not-reset"), "counter-not-reset")

    assert json.loads(trace("counter-not-reset")[-3])["sample"]["iteration"] == 5
    assert judge.track.passes[0].number == 1
    assert [one.rule for one in fresh[1][:-1]] == [one.rule for one in judge.decided]


def test_the_switch_waits_for_a_pass_with_little_to_send() -> None:
    judge = replay(trace("local-minimum"), "local-minimum")
    later = [one.size for one in judge.track.passes[1:]]

    assert judge.track.passes[-1].size <= min(later) * 1.04
    assert max(later[-4:]) > 4 * min(later)
    assert judge.decided[0].at < judge.track.passes[-1].began + 1


def test_a_dead_link_is_silent_while_the_rule_falls_due() -> None:
    """Without the link's death the switch comes; it is not another condition that prevents it."""
    alive = replace(
        NAMES["dead-network"], machine=lambda: replace(NAMES["dead-network"].machine(), link=gbit)
    )

    assert [type(one) for one in record(alive)[1]] == [Decided, Decided]
    assert 30 < record(alive)[1][0].at < 40


def gbit(_at: float) -> float:
    return 119.0 * MIB
