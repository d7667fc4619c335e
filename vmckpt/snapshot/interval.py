"""Compute the snapshot interval for `interval: auto`, with the arithmetic as text. Pure.

Let C be the cost of a snapshot, in seconds of the guest's work, and M the mean time between
failures. With interval t, about C/t of the work is lost to snapshots, and about t/2M to failures.
Young's interval sqrt(2CM) minimises the sum if C is small compared with M.
Daly's interval is better otherwise: sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and M for C >= 2M.
"""

import math
from dataclasses import dataclass

from vmckpt.units import Seconds, show_count, show_seconds

# The ratio C/2M above which Young's interval is off by more than 2 %.
_SMALL = 0.0009
_DAY = 86400.0
PRIOR = Seconds(30 * _DAY)
"""The assumption before any observation: one failure in 30 days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A snapshot interval and its reason."""

    interval: Seconds
    reason: str
    """The arithmetic as text."""
    lost: float
    """The share of the guest's work that is lost to snapshots and failures together, 0 to 1."""


def between_failures(
    watched: Seconds, failures: int, prior: Seconds = PRIOR
) -> tuple[Seconds, str]:
    """Estimate the mean time between failures. Returns the estimate, and its arithmetic as text.

    `watched` is the observed time. One failure in `prior` is added to the observation, so that an
    observation that is short or without failures does not dominate the estimate. Raises ValueError
    if a time or count is negative, or if `prior` is 0.
    """
    if watched < 0 or failures < 0 or not prior > 0:
        raise ValueError(
            f"invalid argument: {watched} s observed, {failures} failures, prior {prior} s"
        )
    mean = Seconds((watched + prior) / (failures + 1))
    return mean, (
        f"M = ({_days(watched)} observed + {_days(prior)})"
        f" / ({show_count(failures, 'failure')} + 1) = {_days(mean)}"
    )


def pace(cost: Seconds, between: Seconds, *, least: Seconds, most: Seconds) -> Pace:
    """Return the interval for a snapshot's cost and the mean time between failures.

    `cost` is the work that the guest loses to its pause and slowdown, in seconds, not the time that
    copying takes. The interval is at least `least` and at most `most`. Raises ValueError if an
    argument is out of range.
    """
    if not (0 <= cost < math.inf) or not between > 0 or not 0 < least <= most:
        raise ValueError(
            f"invalid argument: cost {cost} s, mean time between failures {between} s, interval"
            f" from {least} to {most} s"
        )
    best, text = _best(cost, between)
    interval = min(max(best, least), most)
    if interval > best:
        text += f"; at least {show_seconds(least)}"
    elif interval < best:
        text += f"; at most {show_seconds(most)}"
    lost = _lost(interval, cost, between)
    return Pace(
        interval=Seconds(interval),
        reason=f"{text}; about {100 * lost:.2g} % of the guest's work is lost",
        lost=lost,
    )


def _best(cost: float, between: float) -> tuple[float, str]:
    known = f"C = {show_seconds(cost)}, M = {_days(between)}"
    if math.isinf(between):
        return math.inf, f"{known}: no failures, so no snapshots"
    ratio = cost / (2 * between)
    young = math.sqrt(2 * cost * between)
    if ratio >= 1:
        return between, f"{known}: C is at least 2M, so the interval is M (Daly)"
    if ratio <= _SMALL:
        return young, f"{known}: sqrt(2CM) = {show_seconds(young)} (Young)"
    root = math.sqrt(ratio)
    daly = young * (1 + root / 3 + ratio / 9) - cost
    return daly, (
        f"{known}: sqrt(2CM)(1 + sqrt(C/2M)/3 + (C/2M)/9) - C"
        f" = {show_seconds(young)} * {1 + root / 3 + ratio / 9:.3f} - {show_seconds(cost)}"
        f" = {show_seconds(daly)} (Daly)"
    )


def _lost(interval: float, cost: float, between: float) -> float:
    return min(1.0, cost / (interval + cost) + (interval + cost) / (2 * between))


def _days(seconds: float) -> str:
    return f"{seconds / _DAY:.1f} days" if 2 * _DAY <= seconds < math.inf else show_seconds(seconds)
