"""Accesses to missing pages that wait until the pages are here."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory.missing_pages import MemoryGone, MissingPages
from vmckpt.hypervisor.qemu_process import userfaultfd

CONTENT = np.repeat(np.arange(256, dtype=np.uint8), 4096)
"""Each page is filled with its number."""
AT = int(CONTENT.ctypes.data)


@pytest.fixture(params=["private", "shared"])
def process(request: pytest.FixtureRequest) -> Iterator[WrittenProcess]:
    with WrittenProcess(shared=request.param == "shared") as made:
        yield made


class Reading(threading.Thread):
    """The process reads pages, and may wait for them."""

    def __init__(self, process: WrittenProcess, pages: list[int]) -> None:
        super().__init__(daemon=True)
        self.process, self.pages = process, pages
        self.found: list[int] = []
        self.start()

    def run(self) -> None:
        self.found = self.process.read(self.pages)


def serving(process: WrittenProcess) -> tuple[MissingPages, int]:
    number = userfaultfd.create_inside(process.held)
    pages = MissingPages(process.held, number, [process.range])
    pages.register()
    return pages, number


def test_an_access_waits_for_its_page_and_finds_the_right_content(process: WrittenProcess) -> None:
    process.write([9])
    pages, _ = serving(process)
    with pages:
        reading = Reading(process, [9, 5, 200])
        for page in (5, 200):
            assert pages.faults(5.0) == [process.range.start + 4096 * page]
            assert pages.copy(process.range.start + 4096 * page, AT + 4096 * page, 4096) == 1
        reading.join()
        assert reading.found == [1, 5, 200]
        assert pages.copy(process.range.start, AT, 4096 * 256) == 253
        assert process.read(range(256)) == [1 if page == 9 else page for page in range(256)]
        pages.unregister()


def test_what_is_missing_at_the_end_is_zeros(process: WrittenProcess) -> None:
    pages, number = serving(process)
    with pages:
        pages.fill_zeros(process.range.start, 2 * 4096)
        assert process.read([0, 1]) == [0, 0]
        reading = Reading(process, [7])
        pages.faults(5.0)
        pages.unregister()
        reading.join()
        assert reading.found == [0]
    userfaultfd.close_inside(process.held, number)
    assert list(userfaultfd.opened(process.held)) == []


def test_when_the_server_dies_accesses_wait_for_the_next_one(process: WrittenProcess) -> None:
    pages, number = serving(process)
    with pages:
        reading = Reading(process, [3])
        assert pages.faults(5.0)  # read by the server that dies now
    reading.join(0.3)
    assert reading.is_alive()
    with MissingPages(process.held, number, [process.range]) as following:
        assert following.faults(0.1) == []
        following.retry()
        assert following.faults(5.0) == [process.range.start + 4096 * 3]
        following.copy(process.range.start, AT, 4096 * 4)
        reading.join()
        assert reading.found == [3]


def test_a_process_that_has_ended_has_no_memory(process: WrittenProcess) -> None:
    pages, _ = serving(process)
    with pages:
        process.kill()
        with pytest.raises(MemoryGone):
            pages.copy(process.range.start, AT, 4096)
        with pytest.raises(MemoryGone):
            pages.fill_zeros(process.range.start, 4096)


def test_reads_by_system_calls_wait_as_well(process: WrittenProcess) -> None:
    """A guest's disk is read into its memory by the kernel, not by QEMU's own instructions."""
    pages, _ = serving(process)
    with pages:
        reading = threading.Thread(target=lambda: process.load([11]), daemon=True)
        reading.start()
        assert pages.faults(5.0) == [process.range.start + 4096 * 11]
        pages.copy(process.range.start, AT, 4096 * 256)
        reading.join()
        assert process.read([11]) == [0]  # as loaded from /dev/zero
        pages.unregister()
