"""When moves on their way are about to arrive: what they leave of their links others may use.

The next one needs its setup before it needs a link, so it may begin that long before. Pure.
"""

from vmckpt.evacuate.links import SETUP
from vmckpt.migrate.forecast import Range
from vmckpt.model.events import Estimate
from vmckpt.units import Seconds


class Nearing:
    """Moves on their way, by their guests' names; times are those of one clock."""

    def __init__(self) -> None:
        self._began: dict[str, Seconds] = {}
        self._due: dict[str, Range] = {}
        """From when on it is about to arrive by its forecast, and until when that is believed."""
        self._measured: dict[str, bool | None] = {}
        """Whether it is, by what was measured last; None: it may be, for all that is seen."""
        self._setup = SETUP
        """As long as the last one took from its turn to its first bytes."""

    def begins(self, name: str, expected: Range | None, now: Seconds) -> None:
        """Its turn has come. `expected`: seconds from its first bytes on."""
        self._began[name] = now
        if expected is not None:
            # Its own setup before that takes as long as the next one's.
            until = now + self._setup + expected.high
            self._due[name] = Range(now + expected.middle, until)

    def measured(self, name: str, estimate: Estimate, now: Seconds) -> None:
        """What is known of its end while it runs."""
        began = self._began.get(name)
        if began is not None and name not in self._measured:
            self._setup = Seconds(max(SETUP, now - began))
        low, high = estimate.low, estimate.high
        if low is None or low > self._setup:
            self._measured[name] = False
        elif high is None:
            # In the first pass nobody sees yet what will be sent again; the forecast has that.
            self._measured[name] = None
        else:
            self._measured[name] = (low + high) / 2 <= self._setup

    def ended(self, name: str) -> None:
        """However it did."""
        for known in (self._began, self._due, self._measured):
            known.pop(name, None)

    def names(self, now: Seconds) -> frozenset[str]:
        """Who is about to arrive."""
        due = {
            name for name, span in self._due.items()
            if span.low <= now <= span.high and self._measured.get(name) is None
        }  # fmt: skip
        return frozenset(due | {name for name, near in self._measured.items() if near})
