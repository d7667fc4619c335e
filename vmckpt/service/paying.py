"""How often snapshots pay, from what the journal tells of a guest: `every: auto`. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.journal.records import Operation
from vmckpt.model.migration import Outcome
from vmckpt.policy.calendar import Interval
from vmckpt.policy.model import Auto
from vmckpt.snapshot import interval
from vmckpt.units import Seconds, show_seconds

LEAST, MOST = Seconds(300.0), Seconds(86400.0)
_SLOWER = 0.3
"""Share of its work that a guest loses at most while it is captured."""
_UNKNOWN = Seconds(5.0)
"""Taken for the cost before there was one."""
_LATEST = 9


@dataclass(frozen=True, slots=True)
class Reckoned:
    """An interval, and the arithmetic."""

    when: Interval
    text: str


def reckoned(auto: Auto, past: Sequence[Operation], now: float) -> Reckoned:
    """The interval for a guest, from its operations, the latest first."""
    cost, how = _cost(past)
    # A guest that was put back in its own place had been lost.
    failures = sum(one.kind == "restore" and one.outcome == Outcome.COMPLETED for one in past)
    watched = Seconds(max(0.0, now - min((one.began_at for one in past), default=now)))
    between, why = interval.between_failures(watched, failures, auto.one_failure_in)
    found = interval.pace(cost, between, least=LEAST, most=MOST)
    # Whole seconds: a schedule that moves by parts of them looks like a new one each time.
    every = Seconds(float(round(found.interval)))
    return Reckoned(Interval(every), f"{how}; {why}; {found.reason}")


def _cost(past: Sequence[Operation]) -> tuple[Seconds, str]:
    told = [
        (one.report["pause_ms"] / 1000, one.report["took_ms"] / 1000)
        for one in past
        if one.kind == "snapshot" and one.outcome == Outcome.COMPLETED and one.report is not None
        and {"pause_ms", "took_ms"} <= one.report.keys()
    ][:_LATEST]  # fmt: skip
    if not told:
        return _UNKNOWN, f"C = {show_seconds(_UNKNOWN)}, as nothing is known of it yet"
    pause = statistics.median(one for one, _ in told)
    took = statistics.median(one for _, one in told)
    cost = Seconds(pause + _SLOWER * took)
    return cost, (
        f"C = {show_seconds(pause)} + {_SLOWER:.0%} of {show_seconds(took)}"
        f" = {show_seconds(cost)}, of the last {len(told)}"
    )
