"""When a protected guest's clock is put right."""

import pytest

from vmckpt.replication.guest_clock import WORTH, Clock, Reading, decide
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import Seconds


def look(ahead: float, paused: float = 0.0, doubt: float = 0.001) -> Reading:
    return Reading(ahead=Seconds(ahead), doubt=Seconds(doubt), paused=Seconds(paused))


def clock(usual: float, corrected: int = 0) -> Clock:
    return Clock(usual=Seconds(usual), corrected=corrected)


def test_the_first_look_says_what_is_usual() -> None:
    found = decide(None, look(-3600.0))
    assert (found.clock.usual, found.clock.behind, found.put_right) == (-3600.0, 0.0, False)


@pytest.mark.parametrize("usual", [0.0, 0.25, -86400.0])
def test_a_clock_that_stood_still_is_put_right(usual: float) -> None:
    found = decide(clock(usual, 2), look(usual - 2.4, paused=2.4))
    assert found.put_right
    assert found.clock.usual == usual
    assert found.clock.behind == pytest.approx(2.4)
    assert found.clock.corrected == 3


def test_a_little_is_left_to_the_guest() -> None:
    found = decide(clock(0.0), look(-0.9 * WORTH, paused=2.0))
    assert not found.put_right
    assert found.clock.behind == pytest.approx(0.9 * WORTH)


def test_what_a_slow_look_makes_up_is_no_reason() -> None:
    assert not decide(clock(0.0), look(-0.5, paused=2.0, doubt=0.4)).put_right


@pytest.mark.parametrize(
    ("ahead", "why"), [(5.0, "set forward"), (-7.5, "set back by more than it stood still")]
)
def test_a_clock_that_somebody_set_is_theirs(ahead: float, why: str) -> None:
    found = decide(clock(0.0, 1), look(ahead, paused=2.0))
    assert not found.put_right, why
    assert found.clock == clock(ahead, 1)


def test_without_an_agent_it_is_behind_by_all_that_it_stood_still() -> None:
    told = PrimaryStatus().as_json()
    assert (told["guest_clock_behind_s"], told["guest_clock_corrected"]) == (0.0, None)
