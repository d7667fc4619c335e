"""What an epoch of a process would cost, measured while it runs."""

import threading

import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import write_tracking
from vmckpt.capture.memory.write_tracking import WriteTracking
from vmckpt.model.epoch_cost import EpochCost, Finder
from vmckpt.replication.dirty_pages import epoch_cost


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
