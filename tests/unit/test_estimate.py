import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.builders import sample
from vmckpt.migrate.estimate import estimate, share_done
from vmckpt.model.jobs import JobPhase
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


def test_a_slow_writer_converges_in_a_range() -> None:
    seen = estimate([sample(iteration=2, remaining=100 * MIB, dirty_rate=20 * MIB)], LIMIT)

    assert seen.low is not None
    assert seen.high is not None
    assert 1.0 <= seen.low <= seen.high <= 2.0
    assert seen.converging


def test_a_writer_faster_than_the_link_does_not_converge() -> None:
    seen = estimate([sample(iteration=2, remaining=100 * MIB, dirty_rate=200 * MIB)], LIMIT)

    assert (seen.low, seen.high, seen.converging) == (None, None, False)


def test_a_fast_writer_on_a_small_region_converges_as_long_as_less_is_left_each_time() -> None:
    falling = [
        sample(iteration=i, remaining=left * MIB, dirty_rate=200 * MIB)
        for i, left in ((2, 90), (3, 70), (4, 50))
    ]
    level = [
        sample(iteration=i, remaining=left * MIB, dirty_rate=200 * MIB)
        for i, left in ((2, 50), (3, 52), (4, 50))
    ]

    assert estimate(falling, LIMIT).converging
    assert estimate(level, LIMIT).converging is False


def test_what_fits_into_the_downtime_is_the_last_pass() -> None:
    seen = estimate([sample(iteration=3, remaining=10 * MIB, dirty_rate=200 * MIB)], LIMIT)

    assert seen.low == seen.high == pytest.approx(0.1)


def test_after_the_switch_only_the_rest_counts() -> None:
    seen = estimate([sample(phase=JobPhase.SWITCHOVER, remaining=10 * MIB)], LIMIT)

    assert seen.low == pytest.approx(0.1)
    assert seen.converging


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 5000)), min_size=1, max_size=30))
def test_the_share_done_never_goes_down_and_stays_within_bounds(
    readings: list[tuple[int, int]],
) -> None:
    samples = [
        sample(remaining=left * MIB, total=256 * MIB, transferred=sent * MIB)
        for left, sent in readings
    ]
    shares = [share_done(samples[: n + 1]) for n in range(len(samples))]

    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)


def test_resent_pages_do_not_push_the_share_over_one() -> None:
    assert share_done([sample(remaining=128 * MIB, transferred=9000 * MIB)]) == 0.5
