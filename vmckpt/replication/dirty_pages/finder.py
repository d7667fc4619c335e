"""Find the pages that changed in an epoch by comparing a guest's memory with its last copy.

This works on every host, but takes time proportional to the memory size, not to the changes.
Changed pages are copied aside while the guest is paused. The caller writes them to the last copy
afterwards, so that differences from it can be sent.
"""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.page_diff import Flags, Mapping, Numbers, differing, tasks
from vmckpt.util import thread_call

Pages = NDArray[np.uint64]

# One processor is left to QEMU and libvirt, which work during the same pause.
_THREADS = max(1, min(4, (os.cpu_count() or 1) - 1))
_NONE: Numbers = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """The changes of an epoch in one block of memory."""

    numbers: Numbers
    """Numbers of changed pages, sorted."""
    pages: Pages
    """New content of these pages. The last copy, if any, still has the previous content."""
    whole: Numbers = field(default_factory=lambda: _NONE)
    """Numbers of further changed pages, whose content is not in `pages`. The last copy, if any,
    already has their new content."""

    @property
    def count(self) -> int:
        return len(self.numbers) + len(self.whole)


class CompareFinder:
    """Finds changed pages by comparison. Use as `with CompareFinder(live, last, most=n) as finder`.

    The caller keeps the mappings open. For each epoch, call `prepare`, then `begin`, and then write
    the pages that were copied aside to the last copy.
    """

    def __init__(self, live: Sequence[Mapping], last: Sequence[Mapping], *, most: int) -> None:
        """`most`: maximum number of an epoch's pages to copy aside. Further pages are written to
        the last copy."""
        self._live, self._last, self._most = live, last, most
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="compare")
        self._room = most
        self._lock = threading.Lock()
        self._held: list[Flags] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def prepare(self) -> None:
        """Populate the mappings while the guest is running, to avoid page faults in the pause."""
        self._held = [live.held() for live in self._live]
        for live, last, held in zip(self._live, self._last, self._held, strict=True):
            live.populate(held)
            last.populate(last.written)

    def begin(self) -> "Future[list[Changed]]":
        """Start the comparison. The memory must not change until the returned future is done."""
        self._room = self._most
        return thread_call.start(self._all, name="comparing")

    def _all(self) -> list[Changed]:
        together = zip(self._live, self._last, self._held, strict=True)
        return [self._one(live, last, held) for live, last, held in together]

    def _one(self, live: Mapping, last: Mapping, expected: Flags) -> Changed:
        work = [self._pool.submit(self._aside, live, last, *one) for one in tasks(expected)]
        held = live.held()
        more = held & ~expected
        work += [self._pool.submit(self._aside, live, last, *one) for one in tasks(more)]
        numbers, pages, whole = [], [], []
        for task in work:
            aside, copies, placed = task.result()
            numbers += aside
            pages += copies
            whole += placed
        gone = np.flatnonzero(last.written & ~held & ~expected)
        gone = gone[last.pages[gone].any(axis=1)] if len(gone) else _NONE
        numbers.append(gone)
        pages.append(np.zeros((len(gone), live.pages.shape[1]), dtype=np.uint64))
        last.written |= held | expected
        return _sorted(np.concatenate(numbers), np.concatenate(pages), whole)

    def _aside(
        self, live: Mapping, last: Mapping, first: int, end: int
    ) -> tuple[list[Numbers], list[Pages], list[Numbers]]:
        aside, copies, placed = [], [], []
        for numbers in differing(live, last, first, end):
            if self._take(len(numbers)):
                aside.append(numbers)
                copies.append(live.pages[numbers])
            else:
                last.pages[numbers] = live.pages[numbers]
                placed.append(numbers)
        return aside, copies, placed

    def _take(self, count: int) -> bool:
        """Return whether `count` more pages may be copied aside; these pages are then counted."""
        with self._lock:
            self._room -= count
            return self._room >= 0


def _sorted(numbers: Numbers, pages: Pages, whole: list[Numbers]) -> Changed:
    order = np.argsort(numbers, kind="stable")
    if not np.array_equal(order, np.arange(len(order))):
        numbers, pages = numbers[order], pages[order]
    placed = np.sort(np.concatenate(whole)) if whole else _NONE
    return Changed(numbers=numbers, pages=pages, whole=placed)
