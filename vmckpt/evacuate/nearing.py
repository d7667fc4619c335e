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
        self._due: dict[str, Seconds] = {}
        """When it is about to arrive, as far as it was forecast and nothing is measured."""
        self._measured: dict[str, bool] = {}
        """Whether it is, by what was measured last."""
        self._setup = SETUP
        """As long as the last one took from its turn to its first bytes."""

    def begins(self, name: str, expected: Range | None, now: Seconds) -> None:
        """Its turn has come. `expected`: seconds from its first bytes on."""
        self._began[name] = now
        if expected is not None:
            # Its own setup before that takes as long as the next one's.
            self._due[name] = Seconds(now + expected.middle)

    def measured(self, name: str, estimate: Estimate, now: Seconds) -> None:
        """What is known of its end while it runs."""
        began = self._began.get(name)
        if began is not None and name not in self._measured:
            self._setup = Seconds(max(SETUP, now - began))
        low, high = estimate.low, estimate.high
        self._measured[name] = (
            low is not None and high is not None and (low + high) / 2 <= self._setup
        )

    def ended(self, name: str) -> None:
        """However it did."""
        for known in (self._began, self._due, self._measured):
            known.pop(name, None)

    def names(self, now: Seconds) -> frozenset[str]:
        """Who is about to arrive."""
        due = {name for name, at in self._due.items() if now >= at and name not in self._measured}
        return frozenset(due | {name for name, near in self._measured.items() if near})
