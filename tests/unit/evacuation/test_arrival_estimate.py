"""When the next move may begin because one is about to arrive."""

from vmckpt.evacuation.arrival_estimate import ArrivalEstimates
from vmckpt.evacuation.bandwidth import SETUP
from vmckpt.evacuation.plan.plan import Checked
from vmckpt.migration.forecast.forecast import Range
from vmckpt.model.events import Estimate
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds


def estimate(low: float | None, high: float | None) -> Estimate:
    return Estimate(
        low=None if low is None else Seconds(low), high=None if high is None else Seconds(high),
        converging=None,
    )  # fmt: skip


def seen(seconds: float, sent: int = 0) -> JobSample:
    return JobSample(
        at=Seconds(seconds), phase=JobPhase.PRE_COPY, iteration=1, remaining=Bytes(0),
        total=Bytes(0), transferred=Bytes(sent), bandwidth=BytesPerSecond(0), dirty_rate=None,
        expected_downtime=None, throttle=0,
    )  # fmt: skip


def expected(total: Range | None, sent: Range | None = None, rate: int | None = None) -> Checked:
    bandwidth = None if rate is None else Range(float(rate), float(rate))
    return Checked(policy="p", mode="hybrid", total=total, sent=sent, bandwidth=bandwidth)


def at(seconds: float) -> Seconds:
    return Seconds(seconds)


def test_by_its_forecast_until_something_is_measured() -> None:
    near = ArrivalEstimates()
    near.begins("a", expected(Range(8.0, 12.0)), at(100.0))
    assert near.names(at(109.9)) == frozenset()
    assert near.names(at(110.0)) == {"a"}
    near.measured("a", estimate(20.0, 40.0), seen(111.0), None)
    assert near.names(at(112.0)) == frozenset()


def test_by_the_middle_of_what_is_measured_and_the_setup_that_was_seen() -> None:
    near = ArrivalEstimates()
    near.begins("a", None, at(0.0))
    assert near.names(at(1000.0)) == frozenset()
    near.measured("a", estimate(30.0, 50.0), seen(4.0), None)  # so a setup takes 4 s here
    assert near.names(at(4.0)) == frozenset()
    near.measured("a", estimate(2.0, 7.0), seen(20.0), None)
    assert near.names(at(20.0)) == frozenset()
    near.measured("a", estimate(2.0, 6.0), seen(21.0), None)
    assert near.names(at(21.0)) == {"a"}
    near.ended("a")
    assert near.names(at(22.0)) == frozenset()


def test_a_setup_is_expected_to_take_as_long_as_the_longest_of_the_last_ones() -> None:
    """Too early costs nothing, too late leaves the link idle."""
    near = ArrivalEstimates()
    for name, began, took in (("a", 0.0, 4.0), ("b", 30.0, 0.1), ("c", 60.0, 0.1)):
        near.begins(name, None, at(began))
        near.measured(name, estimate(4.0, 4.0), seen(began + took), None)
        assert near.names(at(began + took)) == {name}
        near.ended(name)
    near.begins("d", None, at(90.0))
    near.measured("d", estimate(SETUP, SETUP), seen(90.1), None)  # the 4 s are forgotten
    assert near.names(at(90.1)) == {"d"}
    near.measured("d", estimate(SETUP, SETUP + 1), seen(90.2), None)
    assert near.names(at(90.2)) == frozenset()


def test_what_has_no_end_that_is_known_is_not_about_to_end() -> None:
    near = ArrivalEstimates()
    near.begins("a", expected(Range(1.0, 1.0)), at(0.0))
    near.measured("a", estimate(0.5, None), seen(5.0), None)
    assert near.names(at(60.0)) == frozenset()


def test_a_forecast_without_an_end_says_nothing() -> None:
    near = ArrivalEstimates()
    near.begins("a", expected(Range(1.0, float("inf"))), at(0.0))
    assert near.names(at(1e9)) == frozenset()


def test_in_the_first_pass_its_forecast_counts_as_long_as_what_is_seen_allows_it() -> None:
    """What will be sent again nobody sees yet; the link would be idle for the next one's setup."""
    near = ArrivalEstimates()
    near.begins("a", expected(Range(3.0, 6.0)), at(0.0))
    near.measured("a", estimate(4.0, None), seen(5.0), None)  # so a setup takes 5 s here
    assert near.names(at(5.0)) == {"a"}
    near.measured("a", estimate(9.0, None), seen(5.5), None)
    assert near.names(at(5.5)) == frozenset(), "it cannot be there so soon"
    near.measured("a", estimate(1.0, None), seen(6.0), None)
    assert near.names(at(6.0)) == {"a"}
    # Later than the longest that was expected: it may never end.
    assert near.names(at(SETUP + 6.1)) == frozenset()
    near.begins("b", expected(Range(30.0, 60.0)), at(10.0))
    near.measured("b", estimate(1.0, None), seen(12.0), None)
    assert near.names(at(12.0)) == frozenset(), "its forecast says that it is not"


def test_in_the_first_pass_bytes_that_are_expected_and_the_stream_s_own_speed_tell_most() -> None:
    """A forecast of 9 s for a stream that then carries twice as much: the link was idle for 3 s
    after each move while the next one's guest waited on the source."""
    near = ArrivalEstimates()
    sent = Range(100.0 * MIB, 120.0 * MIB)
    near.begins("a", expected(Range(7.0, 11.0), sent, 20 * MIB), at(0.0))
    near.measured("a", estimate(2.0, None), seen(3.0, 10 * MIB), None)  # so a setup takes 3 s
    assert near.names(at(3.0)) == frozenset(), "100 MiB at the 20 MiB/s that were expected"
    near.measured("a", estimate(2.0, None), seen(3.5, 30 * MIB), BytesPerSecond(40 * MIB))
    assert near.names(at(3.5)) == {"a"}, "80 MiB at 40 MiB/s"
    near.measured("a", estimate(2.0, None), seen(9.0, 121 * MIB), BytesPerSecond(40 * MIB))
    assert near.names(at(9.0)) == frozenset(), "more than was ever expected: it may never end"
