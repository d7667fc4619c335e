"""Measure what finding a guest's changed pages costs, before the guest is protected."""

import time
from collections.abc import Sequence
from statistics import median

from vmckpt.capture.memory import page_runs
from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.replication.dirty_pages import trackers
from vmckpt.replication.dirty_pages.trackers import Tracker
from vmckpt.units import Bytes, Seconds

_ROUNDS = 3
_APART = 0.1
"""Time between two collections, in seconds: a typical interval between epochs."""


def measure(
    process: HeldProcess, ranges: Sequence[MemoryRange], finder: Finder | None = None
) -> EpochCost:
    """Measure for 0.3 s what it costs to find a guest's written pages. The guest is not paused.

    `finder`: the method; None: the best available method. Returns Finder.COMPARE, with the reasons,
    if no method is available. The cost is unknown if a protection already tracks the guest's
    writes.
    """
    refused: list[str] = []
    for one in trackers.BEST_FIRST if finder is None else (finder,):
        try:
            return _measured(one, process, ranges, why="; ".join(refused))
        except CannotTrack as exc:
            # The guest's present protection is tracking its writes.
            if exc.why in (Why.CONFLICT, Why.IN_USE):
                return EpochCost(finder=one)
            refused.append(exc.message if not refused else exc.reason)
    return EpochCost(finder=Finder.COMPARE, why="; ".join(refused))


def _measured(
    finder: Finder, process: HeldProcess, ranges: Sequence[MemoryRange], *, why: str
) -> EpochCost:
    with trackers.track(finder, process, ranges) as writes:
        writes.collect_all()
        rounds = [_round(writes) for _ in range(_ROUNDS)]
    return EpochCost(
        finder=finder, why=why, scan=Seconds(median(took for took, _ in rounds)),
        written=Bytes(int(median(written for _, written in rounds)) * PAGE),
    )  # fmt: skip


def _round(writes: Tracker) -> tuple[float, int]:
    """Return how long finding the pages took, in seconds, and the number of pages found."""
    time.sleep(_APART)
    began = time.perf_counter()
    found = writes.collect_all()
    took = time.perf_counter() - began
    return took, sum(page_runs.count(runs) for runs in found)
