"""How often to take a snapshot: `interval: auto`, with the arithmetic as text. Pure.

With C seconds of work that one snapshot costs and M seconds between two failures, what is lost is
about C/t for the snapshots and t/2M for the work since the last one. Young's interval sqrt(2CM)
makes the sum least as long as C is small against M; Daly's is better where it is not:
sqrt(2CM) (1 + sqrt(C/2M)/3 + (C/2M)/9) - C, and for C >= 2M it is M.
"""

import math
from dataclasses import dataclass

from vmckpt.units import Seconds, show_seconds

# Above that, Young's interval is off by more than 2 %.
_SMALL = 0.0009
_DAY = 86400.0
PRIOR = Seconds(30 * _DAY)
"""Before anything is known: one failure in 30 days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often, and why."""

    interval: Seconds
    reason: str
    """The arithmetic, for people."""
    lost: float
    """Share of the guest's work that is lost, to snapshots and failures together."""


def between_failures(
    watched: Seconds, failures: int, prior: Seconds = PRIOR
) -> tuple[Seconds, str]:
    """Mean time between failures, and how it was told.

    What was watched counts together with one failure in `prior`, so that neither a short time nor
    one without failures says too much.
    """
    if watched < 0 or failures < 0 or not prior > 0:
        raise ValueError("times and failures cannot be negative")
    mean = Seconds((watched + prior) / (failures + 1))
    times = "failure" if failures == 1 else "failures"
    return mean, (
        f"M = ({_days(watched)} watched + {_days(prior)}) / ({failures} {times} + 1)"
        f" = {_days(mean)}"
    )


def pace(cost: Seconds, between: Seconds, *, least: Seconds, most: Seconds) -> Pace:
    """The interval for a capture's cost and the mean time between failures, within bounds.

    `cost` is work that the guest loses: its pause and slowdown, not the time that copying takes.
    """
    if not (0 <= cost < math.inf) or not between > 0 or not 0 < least <= most:
        raise ValueError(f"cost {cost}, between failures {between}, bounds {least} to {most}")
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
        return math.inf, f"{known}: without failures never"
    ratio = cost / (2 * between)
    young = math.sqrt(2 * cost * between)
    if ratio >= 1:
        return between, f"{known}: C is more than 2M, so M itself (Daly)"
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
