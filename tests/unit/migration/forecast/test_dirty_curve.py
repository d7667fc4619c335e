import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.migration.forecast.dirty_curve import DirtyCurve, PassCourse, course, saturates
from vmckpt.units import MIB, Seconds

MEMORY = 4096.0 * MIB
points = st.lists(
    st.tuples(st.floats(0.01, 1000.0), st.floats(0.0, 1e11)), max_size=8
).map(tuple)  # fmt: skip
times = st.floats(0.0, 1e5)


def writer(region: float, rate: float) -> DirtyCurve:
    """Writes one page after the other in a region, over and over."""
    full = region / rate
    return DirtyCurve(((full, region), (2 * full, region)), MEMORY)


@given(points, times, times)
def test_more_time_never_dirties_less_and_never_more_than_there_is(
    known: tuple[tuple[float, float], ...], one: float, other: float
) -> None:
    curve = DirtyCurve(known, MEMORY)
    early, late = sorted((one, other))

    assert 0 <= curve.within(early) <= curve.within(late) + 1e-3
    assert curve.within(late) <= MEMORY


@given(st.floats(MIB, MEMORY), st.floats(MIB, 1e10), times, times)
def test_a_page_written_again_counts_once(
    region: float, rate: float, one: float, other: float
) -> None:
    """So the curve is concave: twice the time dirties at most twice as much."""
    curve = writer(region, rate)
    middle = curve.within((one + other) / 2)

    assert middle >= (curve.within(one) + curve.within(other)) / 2 * (1 - 1e-9) - 1e-6
    assert curve.within(one) == pytest.approx(min(region, rate * one), rel=1e-6, abs=1)


def test_nothing_is_dirtied_in_no_time_or_if_nothing_is_known() -> None:
    assert DirtyCurve().within(10) == 0
    assert DirtyCurve(((1.0, 5.0),)).within(0) == 0


def test_before_the_only_point_the_curve_may_be_steeper_after_it_is_straight() -> None:
    curve = DirtyCurve(((10.0, 100.0),), 150.0)

    assert [curve.within(t) for t in (1, 2, 5, 10, 12, 99)] == [30, 60, 100, 100, 120, 150]


def test_a_curve_that_rises_goes_on_as_it_ended() -> None:
    curve = DirtyCurve(((1.0, 100.0), (2.0, 150.0)))

    assert [curve.within(t) for t in (0.5, 1.5, 4)] == [50, 125, 250]


def test_noise_does_not_make_later_sets_smaller_and_two_readings_at_once_do_no_harm() -> None:
    curve = DirtyCurve(((2.0, 90.0), (1.0, 100.0), (2.0, 80.0)))

    assert [curve.within(t) for t in (1, 1.5, 2, 3)] == [100, 100, 100, 100]


def test_a_new_measurement_replaces_older_ones_of_about_that_time() -> None:
    curve = DirtyCurve(((1.0, 10.0), (9.0, 50.0)), MEMORY).with_point(1.1, 20.0)

    assert sorted(curve.points) == [(1.1, 20.0), (9.0, 50.0)]
    assert curve.memory == MEMORY
    assert curve.with_point(0.0, 5.0) is curve


def play(region: float, rate: float, size: float, limit: float = 0.3) -> PassCourse:
    return course(writer(region, rate), size, 100.0, Seconds(limit))


# Over 100 bytes per second, 30 of which go within the downtime.
@given(st.floats(1, 1000), st.floats(1, 1000), st.floats(31, 3000))
def test_precopy_converges_if_and_only_if_it_should(
    region: float, rate: float, size: float
) -> None:
    seen = play(region, rate, size)
    if region <= 30 or rate <= 90:
        assert seen.converges
        assert seen.last <= 30
    elif rate >= 100:
        assert not seen.converges


@given(points, st.floats(0, 1e11), st.floats(0, 1e10), st.floats(0, 10))
def test_a_course_ends_whatever_is_known(
    known: tuple[tuple[float, float], ...], size: float, bandwidth: float, limit: float
) -> None:
    seen = course(DirtyCurve(known, MEMORY), size, bandwidth, Seconds(limit))

    assert 0 <= seen.passes <= 60
    assert seen.resent >= 0


def test_a_course_counts_what_is_sent_again_and_how_long_it_takes() -> None:
    seen = play(1000, 50, 400)

    # 400, then 200, 100 and 50 again, and 25 while the guest stands still.
    assert (seen.converges, seen.passes, seen.resent, seen.last) == (True, 4, 375, 25)
    assert seen.lasts == pytest.approx(7.75)


def test_what_fits_into_the_downtime_is_sent_at_once() -> None:
    seen = play(1000, 500, 30)

    assert (seen.converges, seen.passes, seen.resent, seen.last) == (True, 0, 0, 30)


def test_over_a_dead_link_nothing_converges() -> None:
    assert not course(writer(1, 1), 1.0, 0, Seconds(1)).converges


@pytest.mark.parametrize(
    ("known", "level"),
    [
        ([], False),
        ([(1.0, 5.0)], False),
        ([(1.0, 5.0), (2.0, 10.0)], False),
        ([(1.0, 5.0), (2.0, 5.4)], True),
        ([(2.0, 5.4), (1.0, 5.0)], True),
    ],
)
def test_a_curve_saturates_when_its_end_hardly_rises(
    known: list[tuple[float, float]], level: bool
) -> None:
    assert saturates(known) is level
