"""Measure what finding a guest's changed pages costs, before the guest is protected."""

import time
from collections.abc import Sequence
from statistics import median

from vmckpt.capture.memory.write_tracking import (
    CannotTrack,
    MemoryRange,
    Why,
    WriteTracking,
    numbers,
)
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.units import Bytes, Seconds

_ROUNDS = 3
_APART = 0.1
"""Time between two scans, in seconds: a typical interval between epochs."""


def measure(process: HeldProcess, ranges: Sequence[MemoryRange]) -> EpochCost:
    """Track a guest's writes for 0.3 s. The guest is not paused."""
    try:
        with WriteTracking(process, ranges) as writes:
            writes.collect_all()
            rounds = [_round(writes) for _ in range(_ROUNDS)]
    except CannotTrack as exc:
        if exc.why is Why.CONFLICT:  # the guest's present protection is tracking its writes
            return EpochCost(finder=Finder.WRITE_TRACKING)
        return EpochCost(finder=Finder.COMPARE, why=exc.message)
    return EpochCost(
        finder=Finder.WRITE_TRACKING, scan=Seconds(median(took for took, _ in rounds)),
        written=Bytes(int(median(written for _, written in rounds)) * PAGE),
    )  # fmt: skip


def _round(writes: WriteTracking) -> tuple[float, int]:
    """Return the duration of a scan, in seconds, and the number of pages written before it."""
    time.sleep(_APART)
    began = time.perf_counter()
    found = writes.scan()
    took = time.perf_counter() - began
    writes.collect_all()
    return took, sum(len(numbers(runs)) for runs in found)
