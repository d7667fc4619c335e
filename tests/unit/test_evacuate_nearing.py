"""When the next move may begin because one is about to arrive."""

from vmckpt.evacuate.links import SETUP
from vmckpt.evacuate.nearing import Nearing
from vmckpt.migrate.forecast import Range
from vmckpt.model.events import Estimate
from vmckpt.units import Seconds


def estimate(low: float | None, high: float | None) -> Estimate:
    return Estimate(
        low=None if low is None else Seconds(low), high=None if high is None else Seconds(high),
        converging=None,
    )  # fmt: skip


def at(seconds: float) -> Seconds:
    return Seconds(seconds)


def test_by_its_forecast_until_something_is_measured() -> None:
    near = Nearing()
    near.begins("a", Range(8.0, 12.0), at(100.0))
    assert near.names(at(109.9)) == frozenset()
    assert near.names(at(110.0)) == {"a"}
    near.measured("a", estimate(20.0, 40.0), at(111.0))
    assert near.names(at(112.0)) == frozenset()


def test_by_the_middle_of_what_is_measured_and_the_setup_that_was_seen() -> None:
    near = Nearing()
    near.begins("a", None, at(0.0))
    assert near.names(at(1000.0)) == frozenset()
    near.measured("a", estimate(30.0, 50.0), at(4.0))  # so a setup takes 4 s here
    assert near.names(at(4.0)) == frozenset()
    near.measured("a", estimate(2.0, 7.0), at(20.0))
    assert near.names(at(20.0)) == frozenset()
    near.measured("a", estimate(2.0, 6.0), at(21.0))
    assert near.names(at(21.0)) == {"a"}
    near.ended("a")
    assert near.names(at(22.0)) == frozenset()
    near.begins("b", None, at(30.0))
    near.measured("b", estimate(1.0, 2.0), at(30.1))
    assert near.names(at(30.1)) == {"b"}
    near.measured("b", estimate(SETUP, SETUP + 1), at(30.2))
    assert near.names(at(30.2)) == frozenset()


def test_what_has_no_end_that_is_known_is_not_about_to_end() -> None:
    near = Nearing()
    near.begins("a", Range(1.0, 1.0), at(0.0))
    near.measured("a", estimate(0.5, None), at(5.0))
    assert near.names(at(60.0)) == frozenset()


def test_a_forecast_without_an_end_says_nothing() -> None:
    near = Nearing()
    near.begins("a", Range(1.0, float("inf")), at(0.0))
    assert near.names(at(1e9)) == frozenset()


def test_in_the_first_pass_its_forecast_counts_as_long_as_what_is_seen_allows_it() -> None:
    """What will be sent again nobody sees yet; the link would be idle for the next one's setup."""
    near = Nearing()
    near.begins("a", Range(3.0, 6.0), at(0.0))
    near.measured("a", estimate(4.0, None), at(5.0))  # so a setup takes 5 s here
    assert near.names(at(5.0)) == {"a"}
    near.measured("a", estimate(9.0, None), at(5.5))
    assert near.names(at(5.5)) == frozenset(), "it cannot be there so soon"
    near.measured("a", estimate(1.0, None), at(6.0))
    assert near.names(at(6.0)) == {"a"}
    # Later than the longest that was expected: it may never end.
    assert near.names(at(SETUP + 6.1)) == frozenset()
    near.begins("b", Range(30.0, 60.0), at(10.0))
    near.measured("b", estimate(1.0, None), at(12.0))
    assert near.names(at(12.0)) == frozenset(), "its forecast says that it is not"
