import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import sample
from vmckpt.migration.run.progress import estimate, share_done
from vmckpt.model.events import Estimate
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import MIB, Seconds

LIMIT = Seconds(0.3)


def test_nothing_is_known_before_the_first_bytes() -> None:
    assert estimate([], LIMIT).low is None
    assert estimate([sample(bandwidth=0)], LIMIT).low is None


def test_in_the_first_pass_there_is_no_upper_bound() -> None:
    seen = estimate([sample(remaining=200 * MIB, bandwidth=100 * MIB)], LIMIT)

    assert seen.low == pytest.approx(2.0)
    assert seen.high is None
    assert seen.converging is None


def history(*sizes: int, bandwidth: int = 100, each: int = 5) -> list[JobSample]:
    """Samples at the starts of passes of these sizes (MiB), each lasting size / bandwidth."""
    at, samples = 0.0, []
    for number, size in enumerate(sizes, start=1):
        for step in range(each):
            left = size * (1 - step / each)
            samples.append(
                sample(
                    at + step / each * size / bandwidth,
                    iteration=number,
                    remaining=int(left * MIB),
                    bandwidth=bandwidth * MIB,
                )
            )
        at += size / bandwidth
    return samples


def test_in_the_second_pass_there_is_still_no_upper_bound() -> None:
    seen = estimate(history(250, 60), LIMIT)

    assert seen.low is not None
    assert (seen.high, seen.converging) == (None, None)


def test_passes_that_shrink_converge_in_a_range() -> None:
    seen = estimate(history(400, 200, 100), LIMIT)

    assert seen.converging
    assert seen.low is not None
    assert seen.high is not None
    # What is left: a fifth of 100 MiB now, then 50, then 25 MiB, at 100 MiB/s.
    assert seen.low <= 0.95 <= seen.high


def test_passes_that_do_not_shrink_do_not_converge() -> None:
    seen = estimate(history(190, 64, 64), LIMIT)

    assert (seen.low, seen.high, seen.converging) == (None, None, False)


def test_near_the_end_of_a_pass_that_does_not_shrink_no_end_is_promised() -> None:
    seen = estimate(history(190, 64, 64, 63, each=50), LIMIT)

    assert seen.converging is False


def test_what_fits_into_the_downtime_is_the_last_pass() -> None:
    seen = estimate(history(400, 200, 20, each=1), LIMIT)

    assert seen.low == seen.high == pytest.approx(0.2)


def test_after_the_switch_only_the_rest_counts() -> None:
    seen = estimate([sample(phase=JobPhase.SWITCHOVER, remaining=10 * MIB)], LIMIT)

    assert seen.low == pytest.approx(0.1)
    assert seen.converging


@given(
    st.one_of(st.none(), st.floats(0, 1e6)), st.one_of(st.none(), st.floats(0, 1e6)),
    st.floats(-1, 1e7),
)  # fmt: skip
def test_the_share_done_is_a_share(low: float | None, high: float | None, elapsed: float) -> None:
    guess = Estimate(
        low=None if low is None else Seconds(low), converging=None,
        high=None if low is None or high is None else Seconds(low + high),
    )  # fmt: skip

    assert 0 <= share_done(guess, Seconds(elapsed)) <= 1


def test_the_share_done_is_that_of_the_time_not_of_bytes_sent() -> None:
    """Pages are sent again and again: what was sent exceeds what there is."""
    many = [sample(remaining=128 * MIB, transferred=9000 * MIB, bandwidth=64 * MIB)]
    guess = estimate(many, LIMIT)

    assert share_done(guess, Seconds(6.0)) == pytest.approx(0.75)


def test_between_two_bounds_the_middle_counts_and_without_any_nothing_is_said() -> None:
    between = Estimate(low=Seconds(2.0), high=Seconds(4.0), converging=True)

    assert share_done(between, Seconds(1.0)) == 0.25
    assert share_done(Estimate(low=None, high=None, converging=False), Seconds(9.0)) == 0.0
    assert share_done(between, Seconds(0.0)) == 0.0
