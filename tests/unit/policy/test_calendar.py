import math
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.policy.calendar import Due, Interval, due, next_after, parse
from vmckpt.units import Seconds

BERLIN = ZoneInfo("Europe/Berlin")
ZONES: list[tzinfo] = [
    UTC, BERLIN, *map(ZoneInfo, ("Asia/Kolkata", "Australia/Lord_Howe", "America/St_Johns",
                                 "Pacific/Apia", "America/New_York")),
]  # fmt: skip
TEXTS = [
    "15min", "1h30min", "hourly", "hourly :20", "daily", "daily 02:30", "daily 02:30,03:30",
    "mon..fri 22:30", "sat,sun 04:00", "weekly 01:00", "monthly", "monthly 28 02:15",
    "monthly last 23:59",
]  # fmt: skip


def at(text: str, zone: tzinfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def after(expression: str, text: str, zone: tzinfo = BERLIN) -> str:
    moment = next_after(parse(expression), at(text, zone), zone)
    return datetime.fromtimestamp(moment, zone).strftime("%a %Y-%m-%d %H:%M")


@pytest.mark.parametrize(
    ("expression", "now", "coming"),
    [
        ("15min", "2025-06-20 12:03", "Fri 2025-06-20 12:18"),
        ("1h30min", "2025-06-20 12:03", "Fri 2025-06-20 13:33"),
        ("2d", "2025-06-20 12:03", "Sun 2025-06-22 12:03"),
        ("hourly", "2025-06-20 12:03", "Fri 2025-06-20 13:00"),
        ("hourly", "2025-06-20 12:00", "Fri 2025-06-20 13:00"),
        ("hourly :20", "2025-06-20 12:03", "Fri 2025-06-20 12:20"),
        ("daily", "2025-06-20 12:03", "Sat 2025-06-21 00:00"),
        ("daily 03:00", "2025-06-20 02:59", "Fri 2025-06-20 03:00"),
        ("daily 03:00", "2025-06-20 03:00", "Sat 2025-06-21 03:00"),
        ("daily 15:00,3:00", "2025-06-20 03:00", "Fri 2025-06-20 15:00"),
        ("DAILY  03:00", "2024-12-31 23:00", "Wed 2025-01-01 03:00"),
        ("weekly", "2025-06-20 12:03", "Mon 2025-06-23 00:00"),
        ("mon..fri 22:30", "2025-06-20 22:00", "Fri 2025-06-20 22:30"),
        ("mon..fri 22:30", "2025-06-20 22:30", "Mon 2025-06-23 22:30"),
        ("fri..mon 01:00", "2025-06-23 01:00", "Fri 2025-06-27 01:00"),
        ("wed,sat 01:00", "2025-06-20 12:00", "Sat 2025-06-21 01:00"),
        ("sun", "2025-06-22 00:00", "Sun 2025-06-29 00:00"),
        ("monthly", "2025-06-20 12:00", "Tue 2025-07-01 00:00"),
        ("monthly 15 02:00", "2025-06-20 12:00", "Tue 2025-07-15 02:00"),
        ("monthly 02:00", "2025-06-20 12:00", "Tue 2025-07-01 02:00"),
        ("monthly last 02:00", "2024-02-01 00:00", "Thu 2024-02-29 02:00"),
        ("monthly last 02:00", "2025-12-31 02:00", "Sat 2026-01-31 02:00"),
    ],
)
def test_the_next_time_is_that_of_the_calendar(expression: str, now: str, coming: str) -> None:
    assert after(expression, now) == coming


@pytest.mark.parametrize(
    ("expression", "now", "coming"),
    [
        pytest.param("daily 02:30", "2025-03-29 12:00", "Sun 2025-03-30 03:30", id="skipped"),
        pytest.param("daily 02:30", "2025-03-30 03:30", "Mon 2025-03-31 02:30", id="after it"),
        pytest.param("daily 02:30,03:30", "2025-03-30 03:30", "Mon 2025-03-31 02:30", id="one"),
        pytest.param("daily 02:30", "2025-10-25 12:00", "Sun 2025-10-26 02:30", id="twice"),
        pytest.param("hourly", "2025-03-30 01:30", "Sun 2025-03-30 03:00", id="hour skipped"),
    ],
)
def test_changes_of_clocks_neither_lose_nor_double_a_run(
    expression: str, now: str, coming: str
) -> None:
    assert after(expression, now) == coming


def test_a_time_that_comes_twice_counts_once_but_every_real_hour_counts() -> None:
    first = at("2025-10-26 02:30")

    assert next_after(parse("daily 02:30"), first, BERLIN) == at("2025-10-27 02:30")
    assert next_after(parse("hourly :30"), first, BERLIN) == first + 3600


def test_zones_of_odd_minutes_have_hours_too() -> None:
    assert after("hourly", "2025-06-20 12:03", ZoneInfo("Asia/Kolkata")).endswith("13:00")
    # The clocks go back by half an hour at 02:00, so 01:30 to 02:00 comes twice.
    zone = ZoneInfo("Australia/Lord_Howe")
    half = at("2025-04-06 01:45", zone)
    assert next_after(parse("hourly :45"), half, zone) == half + 1800


@pytest.mark.parametrize(
    "text",
    ["", "15", "min", "0s", "400d", "-5min", "15min 20min", "daily 24:00", "daily 3", "daily 03:60",
     "daily 03:00 04:00", "daily 03:00,", "monday 03:00", "mon.fri 03:00", "mon.. 03:00 x", "..fri",
     "monthly 29", "monthly 0", "monthly last last", "hourly 20", "hourly :60", "hourly :20 :30",
     "x" * 1000, "99999999999min", "1h" * 60, "\n", "daily\x0003:00"],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(
        ValueError, match="is not a valid schedule; use a value like 15min, hourly"
    ) as found:
        parse(text)
    assert len(str(found.value)) < 250


@given(st.text(max_size=100))
def test_noise_is_refused_or_means_something(text: str) -> None:
    try:
        when = parse(text)
    except ValueError:
        return
    assert next_after(when, 1e9, UTC) > 1e9


def test_a_run_that_was_missed_many_times_is_made_up_for_once() -> None:
    when = parse("daily 03:00")
    last, now = at("2025-06-10 03:00"), at("2025-06-20 12:00")

    assert due(when, last, now, BERLIN) == Due(now=True, next=at("2025-06-21 03:00"))
    assert due(when, now, now + 60, BERLIN) == Due(now=False, next=at("2025-06-21 03:00"))


def test_what_never_ran_is_due_and_so_is_what_ran_in_the_future() -> None:
    when = Interval(Seconds(900))

    assert due(when, None, 1000.0, UTC) == Due(now=True, next=1900.0)
    assert due(when, 9e9, 1000.0, UTC) == Due(now=True, next=1900.0)
    assert due(when, 100.0, 1000.0, UTC) == Due(now=True, next=1900.0)
    assert due(when, 101.0, 1000.0, UTC) == Due(now=False, next=1001.0)


@given(
    st.sampled_from(TEXTS), st.sampled_from(ZONES),
    st.datetimes(datetime(2005, 1, 1), datetime(2035, 1, 1)),  # noqa: DTZ001
)  # fmt: skip
def test_the_next_time_is_later_and_none_lies_between(
    text: str, zone: tzinfo, moment: datetime
) -> None:
    when, start = parse(text), moment.replace(tzinfo=UTC).timestamp()
    coming = next_after(when, start, zone)

    assert start < coming <= start + timedelta(days=32).total_seconds()
    if not isinstance(when, Interval):
        for part in (0.001, 0.3, 0.9, 0.999):
            # A microsecond before it, a share of the time that is left may round to all of it.
            between = min(start + (coming - start) * part, math.nextafter(coming, 0.0))
            assert next_after(when, between, zone) == coming


@given(st.sampled_from(TEXTS[4:7]), st.sampled_from(ZONES[:5]), st.integers(2010, 2030))
def test_a_year_has_as_many_runs_as_days(text: str, zone: tzinfo, year: int) -> None:
    when = parse(text)
    moment = datetime(year, 1, 1, tzinfo=zone).timestamp() - 1
    end = datetime(year + 1, 1, 1, tzinfo=zone).timestamp() - 1
    runs = 0
    while (moment := next_after(when, moment, zone)) <= end:
        runs += 1
    days = (datetime(year + 1, 1, 1, tzinfo=UTC) - datetime(year, 1, 1, tzinfo=UTC)).days

    assert runs in ([days * 2, days * 2 - 1] if "," in text else [days])
