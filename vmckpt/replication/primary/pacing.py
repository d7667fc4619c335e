"""Choose the interval between epochs, and give the reason. Pure.

An interval is the time from one capture to the next. A slow epoch increases the interval at once,
and this effect then decays. An automatic interval also grows gradually while the guest sends
nothing; once output has waited, the interval is as short as possible again.
"""

import math
from dataclasses import dataclass, replace

from vmckpt.units import Bytes, Seconds, show_bytes, show_count, show_seconds

# The interval is longer than an epoch takes by this factor, so that epochs are rarely late.
_HEADROOM = 1.2
# The factor by which the remembered duration of a slow epoch decreases with each epoch: the effect
# of an epoch of 4 s ends within about 16 s.
_FORGETTING = 0.75
# The weight of a new pause in the average, and the factor by which a pause may exceed the average:
# a single long pause makes the interval 30 % longer; ten long pauses in a row determine it.
_NEWS = 0.3
_OUTLIER = 2.0
# The factor by which the interval grows with each epoch in which the guest sends nothing.
_GROWTH = 1.15
_START = Seconds(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingTerms:
    """The limits of the interval between epochs. Raises ValueError for impossible values."""

    interval: Seconds | None
    """Fixed interval; None: automatic, as short as `slowdown` permits while the guest is sending.
    """
    floor: Seconds = Seconds(0.02)
    ceiling: Seconds = Seconds(10.0)
    slowdown: float = 0.10
    """Automatic interval: the maximum share of the guest's time that pauses may take, 0 to 1."""
    relaxed: float = 4.0
    """The factor by which an automatic interval may grow while no output is waiting."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.ceiling < math.inf:
            raise ValueError(f"invalid limits for the interval: {self.floor} to {self.ceiling} s")
        if self.interval is not None and not 0 < self.interval < math.inf:
            raise ValueError(f"invalid interval: {self.interval} s")
        if not 0 < self.slowdown < 1 <= self.relaxed < math.inf:
            raise ValueError(
                f"invalid pacing: slowdown {self.slowdown}, interval growth factor {self.relaxed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The measurements of one epoch. Raises ValueError for impossible times."""

    interval: Seconds
    """The interval in force: from the previous capture to this capture."""
    pause: Seconds
    """How long the guest was paused."""
    busy: Seconds
    """Time from the pause to the acknowledgement: compressing, sending, waiting for the backup."""
    output_waited: int
    """Number of packets that waited for the epoch, at the network card that has the most."""
    bytes: Bytes
    """Bytes sent for the epoch."""

    def __post_init__(self) -> None:
        if not all(0 <= time < math.inf for time in (self.interval, self.pause, self.busy)):
            raise ValueError(f"invalid times: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The interval in force."""

    interval: Seconds
    why: str
    """The reason, for display, with the numbers from which the interval was computed."""
    pause: Seconds | None = None
    """Moving average of the guest's pauses; None before the first pause."""
    took: Seconds = Seconds(0.0)
    """How long an epoch takes, including its pause; the effect of a slow epoch decays."""


def initial_pace(terms: PacingTerms) -> Pace:
    """Return the pace to use before anything is known about the guest and the network."""
    wanted = _START if terms.interval is None else terms.interval
    interval = _within(wanted, terms)
    why = "initial interval" if terms.interval is None else "as requested"
    return Pace(interval=interval, why=f"{why}: {_told(interval, wanted)}")


def decide(pace: Pace, cycle: Cycle, terms: PacingTerms) -> Pace:
    """Return the pace after an epoch was acknowledged."""
    known = pace.pause or cycle.pause
    pause = known + _NEWS * (min(cycle.pause, known * _OUTLIER) - known)
    took = max(cycle.pause + cycle.busy, pace.took * _FORGETTING)
    now = replace(pace, pause=Seconds(pause), took=Seconds(took))
    if terms.interval is None:
        return _auto(now, cycle, terms)
    return _fixed(now, cycle, terms, _within(terms.interval, terms))


def _fixed(now: Pace, cycle: Cycle, terms: PacingTerms, asked: Seconds) -> Pace:
    if now.took <= asked:
        why = f"as requested: {_told(asked, terms.interval or asked)}"
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
        because = f"{show_count(cycle.output_waited, 'packet')} waited, and {because}"
        return replace(now, interval=shortest, why=f"{because}: {_told(shortest, least)}")
    # Only the pauses set the limit: an epoch takes longer after a longer interval, so using its
    # duration would push the interval up to the ceiling.
    most = max(shortest, _within(terms.relaxed * _within(bearable, terms), terms))
    interval = Seconds(min(max(shortest, now.interval * _GROWTH), most))
    if interval == shortest:
        return replace(now, interval=interval, why=f"{because}: {_told(interval, least)}")
    why = f"no output waited: {show_seconds(interval)}, at most {show_seconds(most)}"
    return replace(now, interval=interval, why=why)


def _slow(now: Pace, cycle: Cycle) -> str:
    if now.took > cycle.pause + cycle.busy:
        return f"recent epochs took up to {show_seconds(now.took)}"
    return f"an epoch of {show_bytes(cycle.bytes)} took {show_seconds(now.took)}"


def _within(interval: float, terms: PacingTerms) -> Seconds:
    return Seconds(min(max(interval, terms.floor), terms.ceiling))


def _told(interval: Seconds, wanted: float) -> str:
    if interval > wanted:
        return f"{show_seconds(interval)} (the minimum)"
    if interval < wanted:
        return f"{show_seconds(interval)} (the maximum)"
    return show_seconds(interval)
