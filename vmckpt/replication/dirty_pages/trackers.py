"""The methods by which the kernel reports the pages that a guest has written."""

from collections.abc import Sequence
from typing import Protocol, Self

from vmckpt.capture.memory.page_runs import Runs
from vmckpt.capture.memory.soft_dirty import SoftDirty
from vmckpt.capture.memory.write_tracking import MemoryRange, WriteTracking
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.model.epoch_cost import Finder

BEST_FIRST = (Finder.WRITE_TRACKING, Finder.SOFT_DIRTY)
"""The methods of this module, the best method first."""


class Tracker(Protocol):
    """Tracks the writes to ranges of a process's memory until it is closed.

    At first, all pages count as written.
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...

    def extend(self, ranges: Sequence[MemoryRange]) -> None:
        """Track the previous ranges and new ranges, all of whose pages count as written.

        `ranges`: all of these ranges. Raises CannotTrack; then only the previous ranges are
        tracked.
        """

    def scan(self) -> list[Runs]:
        """Return, for each range, the pages that were written since the last collection.

        Raises CannotTrack.
        """

    def collect_all(self) -> list[Runs]:
        """Like `scan`; the pages then no longer count as written. The guest must be paused.

        Raises CannotTrack; then it is not known which pages were written.
        """


def track(finder: Finder, process: HeldProcess, ranges: Sequence[MemoryRange]) -> Tracker:
    """Begin to track the writes to ranges of a process's memory.

    `finder`: one of `BEST_FIRST`. Raises CannotTrack.
    """
    if finder is Finder.SOFT_DIRTY:
        return SoftDirty(process, ranges)
    return WriteTracking(process, ranges)
