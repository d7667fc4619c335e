"""Measure the speed of this machine, and scale time limits accordingly.

A time limit that suits an idle machine is too short on a machine of half the speed, or under load.
`Deadline` measures how long a fixed piece of work takes now, relative to the reference machine on
which the limits were chosen, and extends its limit by this factor. A limit is never shortened.
"""

import time
from statistics import median

_ROUNDS = 400_000
REFERENCE = 0.03
"""Seconds for `_ROUNDS` on the idle reference machine: a core of an AMD EPYC, CPython 3.11."""
_SAMPLES = 3
_MOST = 6.0
"""Maximum factor, so that a wait for an event that never happens is still finite."""


def slowness() -> float:
    """Return how many times longer a piece of work takes than on the reference machine, at least 1.

    The measurement takes 0.1 s on an idle machine, and longer under load.
    """
    return max(1.0, median(_sample() for _ in range(_SAMPLES)) / REFERENCE)


def _sample() -> float:
    began, value = time.monotonic(), 1
    for _ in range(_ROUNDS):
        value = value * 1103515245 + 12345 & 0x7FFFFFFF
    return time.monotonic() - began


class Deadline:
    """The end of a wait: on an idle machine, `limit` seconds after the Deadline was created.

    A slow machine extends the limit, at most `_MOST` times. The speed is measured only when the
    limit is reached, so that a wait that ends in time costs nothing.
    """

    def __init__(self, limit: float) -> None:
        self._began = time.monotonic()
        self._limit = limit
        self._stretch = 1.0

    def passed(self) -> bool:
        waited = time.monotonic() - self._began
        if waited < self._limit * self._stretch:
            return False
        self._stretch = max(self._stretch, min(slowness(), _MOST))
        return waited >= self._limit * self._stretch
