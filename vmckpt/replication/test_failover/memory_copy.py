"""A second copy of the standby's memory, made while epochs go on being applied to it.

What an epoch touches is noted and copied again, until so little is left that the rest can be copied
while nothing is applied.
"""

import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.page_diff import Flags
from vmckpt.replication.backup.redo_log import Memory

_SLICE = 1024
"""Pages copied at once: 4 MiB."""
ENOUGH = 8192
"""Pages that are copied while the loop waits, a hundredth of a second: 32 MiB."""
MOST = 32768
"""The same for a guest that writes too fast for that."""
_ROUNDS = 10
"""So often what was touched is copied again before that is taken for too fast."""


class Next(Enum):
    """What follows a round."""

    AGAIN = auto()
    CUT = auto()
    GIVE_UP = auto()


def decide(left: int, rounds: int) -> Next:
    """`left`: pages that were touched meanwhile; `rounds`: how often they were copied. Pure."""
    if left <= ENOUGH:
        return Next.CUT
    if rounds < _ROUNDS:
        return Next.AGAIN
    return Next.CUT if left <= MOST else Next.GIVE_UP


class Touched:
    """Pages that were changed since they were last taken from here."""

    def __init__(self, memory: Sequence[Memory]) -> None:
        self._lock = threading.Lock()
        self._flags = [np.zeros(len(one.pages), dtype=np.bool_) for one in memory]

    def __call__(self, file: int, numbers: NDArray[np.intp]) -> None:
        """To be called once they are changed: who copied them before has copied too early."""
        with self._lock:
            self._flags[file][numbers] = True

    def take(self) -> list[Flags]:
        """Those of each file; none are left."""
        with self._lock:
            taken = self._flags
            self._flags = [np.zeros(len(one), dtype=np.bool_) for one in taken]
        return taken

    @property
    def count(self) -> int:
        with self._lock:
            return int(sum(one.sum() for one in self._flags))


def all_pages(memory: Sequence[Memory]) -> list[Flags]:
    """All pages."""
    return [np.ones(len(one.pages), dtype=np.bool_) for one in memory]


def copy(
    source: Sequence[Memory],
    target: Sequence[Memory],
    flags: Sequence[Flags],
    between: Callable[[int], None],
) -> None:
    """Copy those pages; `between` slices it is told how many pages that were."""
    for old, new, some in zip(source, target, flags, strict=True):
        numbers = np.flatnonzero(some)
        for first in range(0, len(numbers), _SLICE):
            part = numbers[first : first + _SLICE]
            if part[-1] - part[0] == len(part) - 1:  # without a copy in between
                stretch = slice(int(part[0]), int(part[-1]) + 1)
                new.pages[stretch] = old.pages[stretch]
            else:
                new.pages[part] = old.pages[part]
            between(len(part))
