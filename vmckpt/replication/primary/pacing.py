"""When the next epoch is taken: the interval in force, and why it is that. Pure.

An interval counts from one capture to the next. What asks for a longer one acts at once; it becomes
shorter again little by little, but a guest whose output waits is not kept waiting without need.
"""

import math
from dataclasses import dataclass, replace

from vmckpt.units import Bytes, Seconds, show_bytes, show_seconds

# An interval is that much longer than an epoch takes, so that not every second one comes late.
_HEADROOM = 1.2
# What is left, after each epoch, of the time that a slow one took: after one of 4 s all is as it
# was within about 16 s.
_FORGETTING = 0.75
# How much of a new pause is believed, and how many times as long as before it may count: a single
# long one makes an interval 30 % longer, ten in a row make it what they ask for.
_NEWS = 0.3
_OUTLIER = 2.0
# How fast the interval of a guest that sends nothing grows.
_GROWTH = 1.15
_START = Seconds(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingTerms:
    """What the operator wants. Raises ValueError if nobody can have it."""

    interval: Seconds | None
    """None: auto, as short as the guest can bear while it sends."""
    floor: Seconds = Seconds(0.02)
    ceiling: Seconds = Seconds(10.0)
    slowdown: float = 0.10
    """For auto: most of the guest's time that pauses may take."""
    relaxed: float = 4.0
    """For auto: how many times as long an interval may be while nothing waits to be sent."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.ceiling < math.inf:
            raise ValueError(f"no interval is between {self.floor} and {self.ceiling} s")
        if self.interval is not None and not 0 < self.interval < math.inf:
            raise ValueError(f"no interval is {self.interval} s long")
        if not 0 < self.slowdown < 1 <= self.relaxed < math.inf:
            raise ValueError(f"a slowdown of {self.slowdown}, relaxed {self.relaxed} times")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What one epoch was. Raises ValueError for times that cannot be."""

    interval: Seconds
    """From the capture before it to its own."""
    pause: Seconds
    """For how long the guest stood still."""
    busy: Seconds
    """From then until it was acknowledged: packing, sending, waiting for the backup."""
    output_waited: int
    """Packets of the guest that waited for it."""
    bytes: Bytes
    """What was sent of it."""

    def __post_init__(self) -> None:
        if not all(0 <= time < math.inf for time in (self.interval, self.pause, self.busy)):
            raise ValueError(f"these times cannot be: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The interval in force."""

    interval: Seconds
    why: str
    """For people, with the numbers that it was made from."""
    pause: Seconds | None = None
    """How long a pause of this guest takes, smoothed; None before the first."""
    took: Seconds = Seconds(0.0)
    """How long an epoch takes, pause and all; a slow one is forgotten little by little."""


def initial_pace(terms: PacingTerms) -> Pace:
    """The pace before anything is known of the guest and the link."""
    wanted = _START if terms.interval is None else terms.interval
    interval = _within(wanted, terms)
    why = "to begin with" if terms.interval is None else "as asked for"
    return Pace(interval=interval, why=f"{why}: {_told(interval, wanted)}")


def decide(pace: Pace, cycle: Cycle, terms: PacingTerms) -> Pace:
    """The pace after an epoch was acknowledged."""
    known = pace.pause or cycle.pause
    pause = known + _NEWS * (min(cycle.pause, known * _OUTLIER) - known)
    took = max(cycle.pause + cycle.busy, pace.took * _FORGETTING)
    now = replace(pace, pause=Seconds(pause), took=Seconds(took))
    if terms.interval is None:
        return _auto(now, cycle, terms)
    return _fixed(now, cycle, terms, _within(terms.interval, terms))


def _fixed(now: Pace, cycle: Cycle, terms: PacingTerms, asked: Seconds) -> Pace:
    if now.took <= asked:
        why = f"as asked for: {_told(asked, terms.interval or asked)}"
        return replace(now, interval=asked, why=why)
    fits = now.took * _HEADROOM
    interval = _within(fits, terms)
    why = f"{_slow(now, cycle)}: {_told(interval, fits)} instead of {show_seconds(asked)}"
    return replace(now, interval=interval, why=why)


def _auto(now: Pace, cycle: Cycle, terms: PacingTerms) -> Pace:
    bearable = (now.pause or 0.0) / terms.slowdown
    fits = now.took * _HEADROOM
    least = max(bearable, fits)
    shortest = _within(least, terms)
    if fits > bearable:
        because = _slow(now, cycle)
    else:
        share = f"{100 * terms.slowdown:g} %"
        because = f"pauses of {show_seconds(now.pause or 0.0)} may take {share} of the time"
    if cycle.output_waited:
        packets = "packet" if cycle.output_waited == 1 else "packets"
        because = f"{cycle.output_waited} {packets} waited, and {because}"
        return replace(now, interval=shortest, why=f"{because}: {_told(shortest, least)}")
    # Only by the pauses: an epoch takes the longer the longer its interval was, and would draw the
    # interval after it up to the ceiling.
    most = max(shortest, _within(terms.relaxed * _within(bearable, terms), terms))
    interval = Seconds(min(max(shortest, now.interval * _GROWTH), most))
    if interval == shortest:
        return replace(now, interval=interval, why=f"{because}: {_told(interval, least)}")
    why = f"nothing waited to be sent: {show_seconds(interval)}, at most {show_seconds(most)}"
    return replace(now, interval=interval, why=why)


def _slow(now: Pace, cycle: Cycle) -> str:
    if now.took > cycle.pause + cycle.busy:
        return f"epochs took up to {show_seconds(now.took)} lately"
    return f"an epoch of {show_bytes(cycle.bytes)} took {show_seconds(now.took)}"


def _within(interval: float, terms: PacingTerms) -> Seconds:
    return Seconds(min(max(interval, terms.floor), terms.ceiling))


def _told(interval: Seconds, wanted: float) -> str:
    if interval > wanted:
        return f"{show_seconds(interval)}, the least allowed"
    if interval < wanted:
        return f"{show_seconds(interval)}, the most allowed"
    return show_seconds(interval)
