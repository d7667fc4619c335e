"""How fast this machine is at the moment, so that limits of waiting scale with it.

A limit in seconds that suits an idle machine fails on one of half the speed, or beside other work.
`Deadline` stretches a limit by the time that a fixed piece of work takes now, compared with what it
takes on the machine on which the limits were chosen. A limit is never shortened.
"""

import time
from statistics import median

_ROUNDS = 400_000
REFERENCE = 0.03
"""Seconds for `_ROUNDS` on that machine, idle: one core of an AMD EPYC, CPython 3.11."""
_SAMPLES = 3
_MOST = 6.0
"""A test that waits in vain must end some day."""


def slowness() -> float:
    """By how much a piece of work takes longer now than on the reference machine; at least 1.

    It takes as many seconds of waiting as the machine is busy: 0.1 s on an idle one.
    """
    return max(1.0, median(_sample() for _ in range(_SAMPLES)) / REFERENCE)


def _sample() -> float:
    began, value = time.monotonic(), 1
    for _ in range(_ROUNDS):
        value = value * 1103515245 + 12345 & 0x7FFFFFFF
    return time.monotonic() - began


class Deadline:
    """The end of a wait: passed once `limit` seconds are over, as many times longer as this machine
    is slower, but no more than `_MOST` times. Its speed is measured when the limit is reached: a
    wait that ends in time costs nothing.
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
