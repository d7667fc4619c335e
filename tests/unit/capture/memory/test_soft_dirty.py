"""Pages that a process has written, by its soft-dirty bits.

Most kernels of test machines have no such bits, so a directory stands for /proc. With
CONFIG_MEM_SOFT_DIRTY, the same tests also use a real process.
"""

import fcntl
import gzip
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory import soft_dirty
from vmckpt.capture.memory.page_runs import Runs, numbers
from vmckpt.capture.memory.soft_dirty import SoftDirty, is_anonymous
from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

PAGES = 256
START = 0x4000_0000
SIMULATED = "a directory"
REAL = soft_dirty.is_supported()
ANONYMOUS = "40000000-40100000 rw-p 00000000 00:00 0 \n"


class SimulatedProcess(WrittenProcess):
    """A process, and a directory with the files that /proc would have for other memory."""

    def __init__(self, proc: Path) -> None:
        super().__init__(1)
        self.folder = proc / str(self.held.pid)
        self.folder.mkdir()
        self.range = MemoryRange(START, PAGES << 12)
        (self.folder / "clear_refs").touch()
        (self.folder / "maps").write_text(ANONYMOUS)
        self._next = 1
        self._put(range(PAGES), 1 << 55)

    def write(self, pages: Iterable[int]) -> None:
        with (self.folder / "pagemap").open("r+b") as file:
            for page in pages:
                self._next += 1
                file.seek((START // 4096 + page) * 8)
                file.write((1 << 63 | 1 << 55 | self._next).to_bytes(8, "little"))

    def discard(self, page: int) -> None:
        self._put([page], 0)

    def replace(self, page: int) -> None:
        """Discard a page, and read it again."""
        self._next += 1
        self._put([page], 1 << 63 | self._next)

    def cleared(self) -> None:
        """What the kernel does when 4 is written to clear_refs."""
        assert (self.folder / "clear_refs").read_bytes() == b"4"
        entries = np.fromfile(self.folder / "pagemap", dtype=np.uint64)
        entries &= ~np.uint64(1 << 55)
        entries.tofile(self.folder / "pagemap")

    def _put(self, pages: Iterable[int], entry: int) -> None:
        path = self.folder / "pagemap"
        path.touch()
        with path.open("r+b") as file:
            for page in pages:
                file.seek((START // 4096 + page) * 8)
                file.write(entry.to_bytes(8, "little"))


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedProcess]:
    with SimulatedProcess(tmp_path) as made, monkeypatch.context() as patched:
        real = soft_dirty.clear

        def clear(clear_refs: int) -> None:
            real(clear_refs)
            made.cleared()

        patched.setattr(soft_dirty, "clear", clear)
        patched.setattr(soft_dirty, "is_supported", lambda: True)
        yield made


@pytest.fixture(params=[SIMULATED, *(["this kernel"] if REAL else [])])
def process(request: pytest.FixtureRequest) -> Iterator[WrittenProcess]:
    if request.param == SIMULATED:
        yield request.getfixturevalue("simulated")
    else:
        with WrittenProcess(PAGES) as made:
            yield made


def tracked(process: WrittenProcess, *ranges: MemoryRange) -> SoftDirty:
    proc = process.folder.parent if isinstance(process, SimulatedProcess) else soft_dirty.PROC
    return SoftDirty(process.held, ranges or [process.range], proc=proc)


def told(found: list[Runs]) -> list[int]:
    assert len(found) == 1
    return [int(number) for number in numbers(found[0])]


def test_each_written_page_is_found_once_it_was_collected(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        assert told(writes.scan()) == list(range(PAGES)), "nothing is known at first"
        assert told(writes.collect_all()) == list(range(PAGES))
        assert told(writes.scan()) == []
        dice = random.Random(7)
        for _ in range(20):
            pages = sorted(dice.sample(range(PAGES), dice.randint(1, 200)))
            process.write(pages)
            assert told(writes.scan()) == pages
            assert told(writes.scan()) == pages, "a scan alone changes nothing"
            assert told(writes.collect_all()) == pages
            assert told(writes.scan()) == []


def test_a_clear_loses_no_bits_of_another_range(process: WrittenProcess) -> None:
    start, half = process.range.start, process.range.size // 2
    with tracked(process, MemoryRange(start + half, half), MemoryRange(start, half)) as writes:
        writes.collect_all()
        process.write([0, 130])
        assert [one.tolist() for one in writes.collect_all()] == [[[2, 3]], [[0, 1]]]
        process.write([1])
        assert [one.tolist() for one in writes.collect_all()] == [[], [[1, 2]]]


@pytest.mark.parametrize("collected", [True, False])
def test_a_range_that_joins_counts_as_written(process: WrittenProcess, collected: bool) -> None:
    start, half = process.range.start, process.range.size // 2
    first, second = MemoryRange(start, half), MemoryRange(start + half, half)
    with tracked(process, second) as writes:
        if collected:
            writes.collect_all()
            process.write([130])
        writes.extend([first, second])
        found = [one.tolist() for one in writes.collect_all()]
        assert found == [[[0, 128]], [[2, 3]] if collected else [[0, 128]]]
        process.write([4, 131])
        assert [one.tolist() for one in writes.collect_all()] == [[[4, 5]], [[3, 4]]]


def test_a_range_that_must_not_join_changes_nothing(simulated: SimulatedProcess) -> None:
    with tracked(simulated) as writes:
        writes.collect_all()
        simulated.write([9])
        with pytest.raises(CannotTrack):
            writes.extend([MemoryRange(1 << 40, 4096), simulated.range])
        assert told(writes.scan()) == [9]


def test_memory_that_was_replaced_counts_as_written(process: WrittenProcess) -> None:
    if isinstance(process, SimulatedProcess):
        return  # only a kernel knows
    with tracked(process) as writes:
        writes.collect_all()
        process.map_again()
        assert told(writes.collect_all()) == list(range(PAGES))


def test_a_page_that_was_discarded_counts_as_written(simulated: SimulatedProcess) -> None:
    simulated.write(range(PAGES))
    with tracked(simulated) as writes:
        writes.collect_all()
        simulated.discard(9)
        simulated.replace(11)
        assert told(writes.collect_all()) == [9, 11]
        assert told(writes.scan()) == []


def test_a_failed_clear_loses_nothing(
    simulated: SimulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise PermissionError(1, "no")

    with tracked(simulated) as writes:
        writes.collect_all()
        simulated.write([4])
        with monkeypatch.context() as patched:
            patched.setattr(soft_dirty, "clear", refused)
            with pytest.raises(CannotTrack) as caught:
                writes.collect_all()
        assert caught.value.why is Why.NO_ACCESS
        assert told(writes.collect_all()) == [4]


def test_two_do_not_use_the_bits_of_one_process(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        writes.collect_all()
        process.write([5])
        with pytest.raises(CannotTrack, match="another vmckpt process") as caught:
            tracked(process)
        assert caught.value.why is Why.IN_USE
        assert told(writes.scan()) == [5]
    with tracked(process):
        pass


def test_the_lock_is_held_on_a_file_of_the_real_proc() -> None:
    with WrittenProcess() as process:
        path = Path(f"/proc/{process.held.pid}/clear_refs")
        first, second = os.open(path, os.O_WRONLY), os.open(path, os.O_WRONLY)
        try:
            fcntl.flock(first, fcntl.LOCK_EX)
            with pytest.raises(BlockingIOError):
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(first)
            os.close(second)


@pytest.mark.parametrize(
    "mapping",
    [
        "40000000-40100000 rw-s 00000000 00:1a 77 /dev/shm/ram",
        "40000000-40100000 rw-p 00000000 00:0f 88 /anon_hugepage (deleted)",
        "40000000-40080000 rw-p 00000000 00:00 0\n40080000-40100000 rw-s 00000000 00:01 3 /memfd:a",
        "50000000-50100000 rw-p 00000000 00:00 0",
    ],
)
def test_memory_with_unreliable_bits_is_refused(simulated: SimulatedProcess, mapping: str) -> None:
    (simulated.folder / "maps").write_text(mapping + "\n")
    with pytest.raises(CannotTrack, match="in a file or huge pages") as caught:
        tracked(simulated)
    assert caught.value.why is Why.NOT_ANONYMOUS


def test_only_the_mappings_of_a_range_matter() -> None:
    maps = "3ff00000-40000000 rw-s 0 00:1a 7 /x\n" + ANONYMOUS + "40100000-40200000 rw-s 0 0:1 7 /x"
    assert is_anonymous(maps, MemoryRange(START, PAGES << 12))
    assert not is_anonymous(maps, MemoryRange(START, (PAGES + 1) << 12))
    assert not is_anonymous(maps, MemoryRange(START - 4096, 8192))


def test_a_process_that_has_ended_is_named(process: WrittenProcess) -> None:
    with tracked(process) as writes:
        process.kill()
        if isinstance(process, SimulatedProcess):
            (process.folder / "pagemap").write_bytes(b"")
        with pytest.raises(CannotTrack) as caught:
            writes.collect_all()
        assert caught.value.why is Why.ENDED


def test_page_tables_that_must_not_be_read_are_named(
    simulated: SimulatedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(CannotTrack, match="not permitted to read QEMU's page tables") as caught:
        tracked(simulated)
    assert caught.value.why is Why.NO_ACCESS


def test_support_agrees_with_the_kernel_s_configuration() -> None:
    config = Path("/proc/config.gz")
    if config.exists():
        text = gzip.decompress(config.read_bytes()).decode()
        assert ("CONFIG_MEM_SOFT_DIRTY=y" in text) == REAL
    else:
        assert REAL in (True, False)


def test_a_kernel_without_the_bits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Such a kernel accepts the clear, and reports no bit.
    monkeypatch.setattr(soft_dirty, "_WRITTEN", np.uint64(0))
    assert not soft_dirty.is_supported()
    with HeldProcess(os.getpid()) as held, pytest.raises(CannotTrack) as caught:
        SoftDirty(held, [])
    assert caught.value.why is Why.NO_SOFT_DIRTY
