"""When moves on their way are about to arrive: what they leave of their links others may use.

The next one needs its setup before it needs a link, so it may begin that long before. A link that
two share for a moment carries as much as before, an idle one nothing: rather early than late. Pure.
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
"""So many setups before count: on busy hosts one takes twice as long as the next."""


class ArrivalEstimates:
    """Moves on their way, by their guests' names; times are those of one clock."""

    def __init__(self) -> None:
        self._began: dict[str, Seconds] = {}
        self._checked: dict[str, Checked] = {}
        self._due: dict[str, Range] = {}
        """From when on it is about to arrive by its forecast, and until when that is believed."""
        self._measured: dict[str, bool | None] = {}
        """Whether it is, by what was measured last; None: it may be, for all that is seen."""
        self._setups: deque[Seconds] = deque(maxlen=_LAST)
        """What the last ones took from their turns to their first bytes."""

    @property
    def _setup(self) -> Seconds:
        return max((SETUP, *self._setups))

    def begins(self, name: str, checked: Checked | None, now: Seconds) -> None:
        """Its turn has come. `checked`: what the plan expects of it."""
        self._began[name] = now
        if checked is None:
            return
        self._checked[name] = checked
        if (total := checked.total) is not None:
            # Its own setup before that takes as long as the next one's.
            self._due[name] = Range(now + total.middle, now + self._setup + total.high)

    def measured(
        self, name: str, estimate: Estimate, sample: JobSample, carried: BytesPerSecond | None
    ) -> None:
        """What is known of its end while it runs. `carried`: by its stream on average so far."""
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
        """Seconds; None: not known. In the first pass nobody sees yet what will be sent again: the
        forecast has that, and the stream tells how fast."""
        checked = self._checked.get(name)
        if checked is None or checked.sent is None:
            return None
        if sample.transferred > checked.sent.high:
            return math.inf  # more than was ever expected: it may never end
        rate = carried or (checked.bandwidth.middle if checked.bandwidth is not None else 0)
        return (checked.sent.middle - sample.transferred) / rate if rate > 0 else None

    def ended(self, name: str) -> None:
        """However it did."""
        for known in (self._began, self._checked, self._due, self._measured):
            known.pop(name, None)

    def names(self, now: Seconds) -> frozenset[str]:
        """Who is about to arrive."""
        due = {
            name for name, span in self._due.items()
            if span.low <= now <= span.high and self._measured.get(name) is None
        }  # fmt: skip
        return frozenset(due | {name for name, near in self._measured.items() if near})
