"""Copy the standby's memory while epochs are still applied to it.

Pages that an epoch changes are recorded and copied again, until so few are left that the rest can
be copied while no epoch is being applied.
"""

import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.page_diff import Flags
from vmckpt.replication.backup.redo_log import Memory

_SLICE = 1024
"""Number of pages to copy at once: 4 MiB."""
ENOUGH = 8192
"""Maximum number of pages to copy while the loop is paused: 32 MiB, a hundredth of a second."""
MOST = 32768
"""Maximum number of pages to copy while the loop is paused, for a guest that writes too fast to
reach `ENOUGH`.
"""
_ROUNDS = 10
"""After this many rounds, the guest is considered to write too fast."""


class Next(Enum):
    """The step after a round: another round, the last round with the loop paused, or giving up."""

    AGAIN = auto()
    CUT = auto()
    GIVE_UP = auto()


def decide(left: int, rounds: int) -> Next:
    """Choose the next step. Pure.

    `left`: number of pages changed during the last round; `rounds`: number of rounds so far.
    """
    if left <= ENOUGH:
        return Next.CUT
    if rounds < _ROUNDS:
        return Next.AGAIN
    return Next.CUT if left <= MOST else Next.GIVE_UP


class Touched:
    """The pages that have changed since the last `take`."""

    def __init__(self, memory: Sequence[Memory]) -> None:
        self._lock = threading.Lock()
        self._flags = [np.zeros(len(one.pages), dtype=np.bool_) for one in memory]

    def __call__(self, file: int, numbers: NDArray[np.intp]) -> None:
        """Record pages. Call this after they were changed, so that an earlier copy is repeated."""
        with self._lock:
            self._flags[file][numbers] = True

    def take(self) -> list[Flags]:
        """Return the recorded pages of each file, and clear the record."""
        with self._lock:
            taken = self._flags
            self._flags = [np.zeros(len(one), dtype=np.bool_) for one in taken]
        return taken

    @property
    def count(self) -> int:
        with self._lock:
            return int(sum(one.sum() for one in self._flags))


def all_pages(memory: Sequence[Memory]) -> list[Flags]:
    """Return flags for all pages of each file."""
    return [np.ones(len(one.pages), dtype=np.bool_) for one in memory]


def copy(
    source: Sequence[Memory],
    target: Sequence[Memory],
    flags: Sequence[Flags],
    between: Callable[[int], None],
) -> None:
    """Copy the flagged pages. After each slice, `between` is called with the number of pages."""
    for old, new, some in zip(source, target, flags, strict=True):
        numbers = np.flatnonzero(some)
        for first in range(0, len(numbers), _SLICE):
            part = numbers[first : first + _SLICE]
            if part[-1] - part[0] == len(part) - 1:  # consecutive: no temporary copy is needed
                stretch = slice(int(part[0]), int(part[-1]) + 1)
                new.pages[stretch] = old.pages[stretch]
            else:
                new.pages[part] = old.pages[part]
            between(len(part))
