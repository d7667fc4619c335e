"""What an epoch of a process would cost, measured while it runs."""

import threading
from collections.abc import Sequence

import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import write_tracking
from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why, WriteTracking
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.replication.dirty_pages import epoch_cost, trackers
from vmckpt.replication.dirty_pages.trackers import Tracker


def test_written_pages_and_the_scan_are_measured() -> None:
    with WrittenProcess(4096) as process:
        over = threading.Event()

        def write() -> None:
            while not over.is_set():
                process.write(range(100, 140))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            found = epoch_cost.measure(process.held, [process.range])
        finally:
            over.set()
            writer.join()
        assert (found.finder, found.why) == (Finder.WRITE_TRACKING, "")
        assert found.written == 40 << 12
        assert found.scan is not None
        assert 0 < found.scan < 1
        assert not process.watched()


def test_a_guest_that_is_protected_already_is_not_measured() -> None:
    with WrittenProcess() as process, WriteTracking(process.held, [process.range]):
        found = epoch_cost.measure(process.held, [process.range])
    assert found == EpochCost(finder=Finder.WRITE_TRACKING)


def test_it_is_told_why_writes_cannot_be_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_tracking, "_FEATURES", 1 << 60)
    with WrittenProcess() as process:
        found = epoch_cost.measure(process.held, [process.range])
        assert found.finder is Finder.COMPARE
        assert "Linux 6.7 or later" in found.why
        assert "CONFIG_MEM_SOFT_DIRTY" in found.why


def test_soft_dirty_bits_are_the_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def track(finder: Finder, process: HeldProcess, ranges: Sequence[MemoryRange]) -> Tracker:
        begun.append(finder)
        if finder is Finder.WRITE_TRACKING and len(begun) == 1:
            raise CannotTrack(process.pid, Why.OLD_KERNEL)
        return WriteTracking(process, ranges)  # this kernel has no soft-dirty bits

    monkeypatch.setattr(trackers, "track", track)
    with WrittenProcess() as process:
        found = epoch_cost.measure(process.held, [process.range])
        assert begun == [Finder.WRITE_TRACKING, Finder.SOFT_DIRTY]
        assert found.finder is Finder.SOFT_DIRTY
        assert "Linux 6.7 or later" in found.why

        begun.clear()
        chosen = epoch_cost.measure(process.held, [process.range], Finder.SOFT_DIRTY)
        assert begun == [Finder.SOFT_DIRTY]
        assert (chosen.finder, chosen.why) == (Finder.SOFT_DIRTY, "")


def test_bits_that_are_in_use_belong_to_the_present_protection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def track(finder: Finder, process: HeldProcess, _: Sequence[MemoryRange]) -> Tracker:
        old = finder is Finder.WRITE_TRACKING
        raise CannotTrack(process.pid, Why.OLD_KERNEL if old else Why.IN_USE)

    monkeypatch.setattr(trackers, "track", track)
    with WrittenProcess() as process:
        found = epoch_cost.measure(process.held, [process.range])
    assert found == EpochCost(finder=Finder.SOFT_DIRTY)
