"""Estimate which moves are about to end, so that the next move can start its setup in time. Pure.

A move does not use a link during its setup, so it may begin one setup time before the link is free.
A link that two moves share for a moment carries as much as before, but an idle link carries
nothing: an early start is better than a late start.
"""

import math
from collections import deque

from vmckpt.evacuation.bandwidth import SETUP
from vmckpt.evacuation.plan.plan import Checked
from vmckpt.migration.forecast.forecast import Range
from vmckpt.model.events import Estimate
from vmckpt.model.migration import JobSample
from vmckpt.units import BytesPerSecond, Seconds

_LAST = 3
"""Number of past setups that are considered: on busy hosts, setup times vary by a factor of two."""


class ArrivalEstimates:
    """Estimates for the running moves, by guest name; all times come from the same clock."""

    def __init__(self) -> None:
        self._began: dict[str, Seconds] = {}
        self._checked: dict[str, Checked] = {}
        self._due: dict[str, Range] = {}
        """Time range in which the move is about to end according to its forecast."""
        self._measured: dict[str, bool | None] = {}
        """Whether the move is about to end; None if the last measurement is inconclusive."""
        self._setups: deque[Seconds] = deque(maxlen=_LAST)
        """Time from the start of a move to its first bytes, for the most recent moves."""

    @property
    def _setup(self) -> Seconds:
        return max((SETUP, *self._setups))

    def begins(self, name: str, checked: Checked | None, now: Seconds) -> None:
        """Record that a move begins. `checked`: the plan's forecast for the move, if any."""
        self._began[name] = now
        if checked is None:
            return
        self._checked[name] = checked
        if (total := checked.total) is not None:
            # The move ends after its own setup and the forecast total. It is due one setup earlier,
            # so the setup is not in the sum.
            self._due[name] = Range(now + total.middle, now + self._setup + total.high)

    def measured(
        self, name: str, estimate: Estimate, sample: JobSample, carried: BytesPerSecond | None
    ) -> None:
        """Update the estimate of a running move. `carried`: average bandwidth of its stream so
        far; None: not known yet."""
        began = self._began.get(name)
        if began is not None and name not in self._measured:
            self._setups.append(Seconds(sample.at - began))
        low, high = estimate.low, estimate.high
        if low is None or low > self._setup:
            self._measured[name] = False
        elif high is None:
            left = self._left(name, sample, carried)
            self._measured[name] = None if left is None else left <= self._setup
        else:
            self._measured[name] = (low + high) / 2 <= self._setup

    def _left(self, name: str, sample: JobSample, carried: BytesPerSecond | None) -> float | None:
        """Return the seconds until the move ends; None if unknown.

        `carried`: bandwidth measured in this move; None: not yet, the forecast's is used.
        In the first pass, the pages that must be sent again are unknown. Their amount is taken from
        the forecast, and the bandwidth from the stream.
        """
        checked = self._checked.get(name)
        if checked is None or checked.sent is None:
            return None
        if sample.transferred > checked.sent.high:
            return math.inf  # more than the forecast's maximum: the move may never end
        rate = carried or (checked.bandwidth.middle if checked.bandwidth is not None else 0)
        return (checked.sent.middle - sample.transferred) / rate if rate > 0 else None

    def ended(self, name: str) -> None:
        """Forget a move that has ended, whatever its result."""
        for known in (self._began, self._checked, self._due, self._measured):
            known.pop(name, None)

    def names(self, now: Seconds) -> frozenset[str]:
        """Return the guests that are about to arrive."""
        due = {
            name for name, span in self._due.items()
            if span.low <= now <= span.high and self._measured.get(name) is None
        }  # fmt: skip
        return frozenset(due | {name for name, near in self._measured.items() if near})
