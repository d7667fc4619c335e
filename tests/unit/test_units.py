from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64MiB", 64 << 20),
        ("64M", 64 << 20),
        ("64mb", 64 << 20),
        ("4096", 4096),
        ("1.5GiB", 3 << 29),
        (" 2 k ", 2048),
        ("0", 0),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("200MiB/s", 200 << 20), ("1gbit", 125_000_000), ("200mbit/s", 25_000_000), ("5K/s", 5120)],
)
def test_rates_are_bytes_or_bits(text: str, expected: int) -> None:
    assert units.parse_rate(text) == expected


def test_one_thing_is_not_a_plural() -> None:
    counts = [units.show_count(number, "guest") for number in (0, 1, 2, 12_000)]
    assert counts == ["0 guests", "1 guest", "2 guests", "12,000 guests"]


@pytest.mark.parametrize(
    ("text", "expected"), [("300ms", 0.3), ("5m", 300), ("1.5s", 1.5), ("2h", 7200), ("20us", 2e-5)]
)
def test_times_need_a_unit(text: str, expected: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "x", "64XB", "-1M", "1e9", "64 i", "i", "NaN", "٣MiB/"])
def test_a_size_that_makes_no_sense_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="64MiB"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["5", "200MiB", "fast", "", "1furlong/s"])
def test_a_rate_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use a value like"):
        units.parse_rate(text)


@pytest.mark.parametrize("text", ["5", "5 years", "ms", "-1s"])
def test_a_time_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use a value like"):
        units.parse_seconds(text)


@given(st.text(max_size=20))
def test_no_text_does_worse_than_a_value_error(text: str) -> None:
    for parse in (units.parse_bytes, units.parse_rate, units.parse_seconds):
        with suppress(ValueError):
            assert parse(text) >= 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.0 KiB"), (138 << 20, "138 MiB"), (1 << 30, "1.0 GiB"),
     (5000 << 30, "5000 GiB")],
)  # fmt: skip
def test_sizes_are_shown_short(size: int, expected: str) -> None:
    assert units.show_bytes(size) == expected


@pytest.mark.parametrize(
    ("time", "expected"),
    [(0, "0 ms"), (0.083, "83 ms"), (4.21, "4.2 s"), (125, "2 min 05 s"), (7260, "2 h 01 min")],
)
def test_times_are_shown_short(time: float, expected: str) -> None:
    assert units.show_seconds(time) == expected
