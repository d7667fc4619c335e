import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.journal.sample_thinning import Retention, due, kept
from vmckpt.units import Seconds

TIMES = st.lists(st.floats(0, 1e6), max_size=60).map(sorted)
SPACINGS = st.sampled_from([0.5, 1.0, 10.0]).map(Seconds)
DAY = 86400.0


def thinned(times: list[float], spacing: float) -> list[float]:
    return [times[index] for index in kept(times, Seconds(spacing))]


@pytest.mark.parametrize(
    ("times", "spacing", "rest"),
    [
        ([], 1.0, []),
        ([5.0], 1.0, [5.0]),
        ([0.0, 0.2, 0.4], 0.0, [0.0, 0.2, 0.4]),
        ([0.0, 0.2, 0.4, 0.9], 1.0, [0.0, 0.9]),
        ([0.1, 0.9, 1.1, 1.5, 3.0, 3.1], 1.0, [0.1, 1.1, 3.0, 3.1]),
        ([0.1, 0.9, 1.1, 1.5, 3.0, 30.1], 10.0, [0.1, 30.1]),
    ],
)
def test_of_each_stretch_the_first_is_kept_and_the_last_of_all(
    times: list[float], spacing: float, rest: list[float]
) -> None:
    assert thinned(times, spacing) == rest


@given(TIMES, SPACINGS)
def test_the_first_and_the_last_stay_and_nothing_is_made_up(
    times: list[float], spacing: Seconds
) -> None:
    chosen = kept(times, spacing)

    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(range(len(times)))
    if times:
        assert (chosen[0], chosen[-1]) == (0, len(times) - 1)


@given(TIMES, SPACINGS)
def test_few_are_left_of_each_stretch_and_no_stretch_is_lost(
    times: list[float], spacing: Seconds
) -> None:
    rest = thinned(times, spacing)

    assert len(rest) <= len({time // spacing for time in times}) + 1
    assert {time // spacing for time in rest} == {time // spacing for time in times}


@given(TIMES, SPACINGS)
def test_thinning_twice_is_thinning_once(times: list[float], spacing: Seconds) -> None:
    assert thinned(thinned(times, spacing), spacing) == thinned(times, spacing)


@given(TIMES)
def test_thinning_finely_first_changes_nothing(times: list[float]) -> None:
    assert thinned(thinned(times, 1.0), 10.0) == thinned(times, 10.0)


@pytest.mark.parametrize(
    ("age", "step"),
    [(0, 0), (3599, 0), (3600, 1), (6 * DAY, 1), (7 * DAY, 2), (89 * DAY, 2), (90 * DAY, 3)],
)
def test_the_older_the_coarser(age: float, step: int) -> None:
    assert due(Seconds(age), Retention()) == step


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_a_step_is_never_taken_back(first: float, second: float) -> None:
    young, old = sorted((first, second))

    assert due(Seconds(young), Retention()) <= due(Seconds(old), Retention())
