"""When the next snapshot is due: after an interval, or by the calendar. Pure.

    15min  6h  1d  1h30min          this long after the last snapshot
    hourly  hourly :20              every hour, at the given minute
    daily 03:00,15:00               every day; at 00:00 if no time is given
    weekly  mon..fri 22:30  sat,sun 04:00           on these days of the week; weekly: on Monday
    monthly  monthly 15 02:00  monthly last 02:00   on this day of the month; else on the first

Calendar times are local to a time zone. A time that is skipped when clocks go forward is shifted
by the same amount. A time that occurs twice counts once, except for `hourly`, which counts real
hours.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from typing import TypeAlias

from vmckpt.units import Seconds

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_EXAMPLE = "use a value like 15min, hourly, daily 03:00, mon..fri 22:30 or monthly 1 02:00"
_LONGEST = 80
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_INTERVAL = re.compile(r"([0-9]{1,6}(s|min|m|h|d))+")
_SHORTEST = 1
_LAST = 0
"""The day number that stands for the last day of a month."""


class Every(StrEnum):
    """The words that can begin a calendar expression, besides the days of the week."""

    HOUR = "hourly"
    DAY = "daily"
    WEEK = "weekly"
    MONTH = "monthly"


@dataclass(frozen=True, slots=True)
class Interval:
    """Due at a fixed interval."""

    every: Seconds


@dataclass(frozen=True, slots=True)
class Hourly:
    """Due every hour, at a given minute."""

    minute: int


@dataclass(frozen=True, slots=True)
class Weekly:
    """Due at given times on some days of the week; `daily` means on all days."""

    days: frozenset[int]
    """Days of the week; 0 is Monday."""
    times: tuple[time, ...]


@dataclass(frozen=True, slots=True)
class Monthly:
    """Due at given times on one day of the month."""

    day: int
    """1 to 28, or 0 for the last day."""
    times: tuple[time, ...]


When: TypeAlias = Interval | Hourly | Weekly | Monthly


@dataclass(frozen=True, slots=True)
class Due:
    """Whether a schedule is due, and when it is due next."""

    now: bool
    """Whether a run is due now; several missed runs count as one."""
    next: float
    """The time of the next run after now, in seconds since 1970."""


def parse(text: str) -> When:
    """Parse an interval or a calendar expression. Raises ValueError with examples."""
    words = text.lower().split() if len(text) <= _LONGEST else []
    try:
        return _parsed(words)
    except (ValueError, IndexError) as exc:
        raise ValueError(f"{text[:_LONGEST]!r} is not a valid schedule; {_EXAMPLE}") from exc


def due(when: When, last: float | None, now: float, zone: tzinfo) -> Due:
    """Return whether a schedule is due, and when it is due next.

    `last`: the time of the last run; None: never, so a run is due. A `last` in the future comes
    from a wrong clock and counts as never, since waiting until then could take years.
    """
    if last is None or last > now:
        return Due(now=True, next=next_after(when, now, zone))
    coming = next_after(when, last, zone)
    if coming <= now:
        return Due(now=True, next=next_after(when, now, zone))
    return Due(now=False, next=coming)


def next_after(when: When, after: float, zone: tzinfo) -> float:
    """Return the first run after a time, both in seconds since 1970.

    An interval counts from `after`.
    """
    match when:
        case Interval():
            return after + when.every
        case Hourly():
            return _next_hour(when, after, zone)
        case Weekly() | Monthly():
            day = datetime.fromtimestamp(after, zone).date()
            return next(moment for moment in _moments(when, day, zone) if moment > after)


def _next_hour(when: Hourly, after: float, zone: tzinfo) -> float:
    # The loop counts real minutes, since a clock change can alter the minute of the hour.
    moment = datetime.fromtimestamp(after // 60 * 60, UTC)
    for _ in range(24 * 60):
        moment += timedelta(minutes=1)
        if moment.astimezone(zone).minute == when.minute:
            break
    return moment.timestamp()


def _moments(when: Weekly | Monthly, first: date, zone: tzinfo) -> Iterator[float]:
    """Yield all runs, beginning on the day before `first`, in order."""
    day = first - timedelta(days=1)
    while True:
        if _has(when, day):
            local = [datetime.combine(day, one, tzinfo=zone) for one in when.times]
            yield from sorted(moment.timestamp() for moment in local)
        day += timedelta(days=1)


def _has(when: Weekly | Monthly, day: date) -> bool:
    if isinstance(when, Weekly):
        return day.weekday() in when.days
    if when.day == _LAST:
        return (day + timedelta(days=1)).day == 1
    return day.day == when.day


def _parsed(words: list[str]) -> When:
    first, rest = words[0], words[1:]
    if _INTERVAL.fullmatch(first) and not rest:
        total = sum(
            int(number) * _UNITS[unit] for number, unit in re.findall(r"([0-9]+)([a-z]+)", first)
        )
        if not _SHORTEST <= total <= 366 * 86400:
            raise ValueError(first)
        return Interval(Seconds(float(total)))
    if first == Every.HOUR:
        return Hourly(_minute(*rest))
    if first == Every.MONTH:
        named = rest[:1] if rest and ":" not in rest[0] else []
        return Monthly(_day_of_month(*named), _times(*rest[len(named) :]))
    if first == Every.DAY:
        return Weekly(frozenset(range(7)), _times(*rest))
    if first == Every.WEEK:
        return Weekly(frozenset({0}), _times(*rest))
    return Weekly(_days(first), _times(*rest))


def _minute(text: str = ":00", *more: str) -> int:
    if more or not re.fullmatch(":[0-5][0-9]", text):
        raise ValueError(text)
    return int(text[1:])


def _times(text: str = "00:00", *more: str) -> tuple[time, ...]:
    if more:
        raise ValueError(text)
    return tuple(sorted({_time(one) for one in text.split(",")}))


def _time(text: str) -> time:
    if not re.fullmatch("[0-2]?[0-9]:[0-5][0-9]", text):
        raise ValueError(text)
    hour, minute = text.split(":")
    return time(int(hour), int(minute))


def _day_of_month(text: str = "1") -> int:
    if text == "last":
        return _LAST
    # Not every month has a 29th; the last day is written as "last".
    if not re.fullmatch("[0-9]{1,2}", text) or not 1 <= int(text) <= 28:
        raise ValueError(text)
    return int(text)


def _days(text: str) -> frozenset[int]:
    found: set[int] = set()
    for one in text.split(","):
        first, _, last = one.partition("..")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        # A range like "fri..mon" spans the weekend.
        found.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(found)
