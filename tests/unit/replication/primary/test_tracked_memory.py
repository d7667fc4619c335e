"""The memory of a real process, tracked from outside, arrives in a standby's memory."""

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.replicas import SHORT, mapped, two_ends
from tests.support.written_process import WrittenProcess
from vmckpt.capture.memory.page_runs import Runs
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why, WriteTracking
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.primary.memory import answer
from vmckpt.replication.primary.tracked_memory import (
    MemoryBlock,
    TrackedMemory,
)
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import Digests, PageRequest

SIZE = 256


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


class Both:
    """A process, and what a standby has of its memory."""

    def __init__(self, process: WrittenProcess, stack: ExitStack, hot: int) -> None:
        blocks = [MemoryBlock("ram", process.range)]
        self._begin(process, TrackedMemory(process.held, lambda: blocks, stack, hot=hot))

    @classmethod
    def of(cls, process: WrittenProcess, memory: TrackedMemory) -> "Both":
        """With another `TrackedMemory` than of all pages."""
        made = cls.__new__(cls)
        made._begin(process, memory)
        return made

    def _begin(self, process: WrittenProcess, memory: TrackedMemory) -> None:
        self.process, self.memory = process, memory
        self.theirs = np.zeros((SIZE, 512), dtype=np.uint64)
        self.memory.track(self.pause)

    def pause(self, work: Callable[[], object]) -> None:
        """The process is stopped meanwhile."""
        os.kill(self.process.held.pid, signal.SIGSTOP)
        while state_of(self.process.held.pid) != "T":
            pass
        work()
        os.kill(self.process.held.pid, signal.SIGCONT)

    def pass_over(self) -> None:
        """A pass of the first copy."""
        self.receive(self.memory.changes(self.pause))

    def epoch(self, *, arrives: bool = True) -> int:
        """How many pages were sent. The process is not asked to write meanwhile."""
        changed = self.memory.begin().result()
        flags = self.memory.flags(changed)
        before = self.theirs.copy()
        count = self.receive(changed)
        assert np.count_nonzero(flags[0]) == count
        if not arrives:
            self.theirs = before
            self.memory.doubt(flags)
        return count

    def receive(self, changed: list[Changed]) -> int:
        count = 0
        for numbers, new, old in self.memory.pieces(0, changed[0]):
            data = page_codec.encode(numbers, new, old)
            came, pages = page_codec.decode(data, lambda some: self.theirs[some], pages=SIZE)
            self.theirs[came] = pages
            self.memory.sent(0, numbers, new)
            count += len(numbers)
        return count

    def follows(self) -> bool:
        memory = ProcessMemory(self.process.held, [self.process.range])
        return np.array_equal(memory.read(0, np.array([[0, SIZE]])), self.theirs)


@pytest.fixture(params=[0, 20, SIZE])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        yield Both(process, stack, request.param)


def test_an_epoch_has_what_was_written_since_the_last_one(both: Both) -> None:
    both.process.write(range(100))
    both.pass_over()
    assert both.follows()
    for pages in ([3], [3, 99, 200], range(5, 60, 2), []):
        both.process.write(pages)
        both.memory.prepare()
        assert both.epoch() == len(pages)
        assert both.follows()


def test_a_capture_that_failed_loses_nothing(both: Both) -> None:
    both.pass_over()
    both.process.write(range(40))
    both.memory.prepare()
    both.process.write([3, 100])
    both.memory.begin().result()  # nothing of it is sent
    both.process.write([5])
    both.memory.prepare()
    assert both.epoch() == 41
    assert both.follows()


def test_any_order_of_writes_and_lost_epochs(both: Both) -> None:
    dice = random.Random(11)
    both.pass_over()
    for _ in range(300):
        both.process.write(sorted(dice.sample(range(SIZE), dice.choice([0, 3, 40]))))
        if dice.random() < 0.8:
            both.memory.prepare()
        both.process.write(sorted(dice.sample(range(SIZE), dice.choice([0, 5]))))
        if dice.random() < 0.1:
            both.pass_over()
        arrives = dice.random() < 0.8
        both.epoch(arrives=arrives)
        assert both.follows() or not arrives
    both.epoch()
    assert both.follows()


@pytest.mark.long
def test_ten_thousand_epochs_in_a_row_lose_no_page() -> None:
    dice = random.Random(5)
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        both = Both(process, stack, 50)
        both.pass_over()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(10_000):
            pages = sorted(dice.sample(range(SIZE), dice.randint(0, 8)))
            process.write(pages)
            both.memory.prepare()
            assert both.epoch() == len(pages)
            assert number % 500 or both.follows()
        assert both.follows()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_pages_are_protected_only_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a write between the scan and the protection, or of a disk's controller, is missed."""
    states = []
    real = WriteTracking.collect_all

    def watched(self: WriteTracking) -> list[Runs]:
        states.append(state_of(self._process.pid))
        return real(self)

    monkeypatch.setattr(WriteTracking, "collect_all", watched)
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        both = Both(process, stack, 50)
        for _ in range(3):
            process.spin(30)
            both.pass_over()
            process.wait()
    assert states == ["T"] * 4


def test_a_collection_that_failed_halfway_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WriteTracking.collect_all

    def halfway(self: WriteTracking) -> list[Runs]:
        real(self)
        raise CannotTrack(self._process.pid, Why.GONE)

    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        both = Both(process, stack, 10)
        both.pass_over()
        process.write([7])
        with monkeypatch.context() as patched:
            patched.setattr(WriteTracking, "collect_all", halfway)
            searching = both.memory.begin()
            with pytest.raises(CannotTrack):
                searching.result()
        both.epoch()
        assert both.follows()


def test_a_hot_page_travels_as_a_difference() -> None:
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        both = Both(process, stack, 10)
        both.pass_over()
        kinds = []
        for arrives in (True, True, False, True):
            process.write([4])
            changed = both.memory.begin().result()
            (piece,) = both.memory.pieces(0, changed[0])
            kinds.append(piece[2] is not None)
            both.memory.sent(0, piece[0], piece[1])
            if not arrives:
                both.memory.doubt(both.memory.flags(changed))
        assert kinds == [False, True, True, False]
        assert not both.memory._blocks[0].hot.known(np.arange(5, SIZE)).any(), "sent only once"


def test_a_pass_over_a_running_guest_sends_differences() -> None:
    """So that a guest that writes faster than the network is caught up with."""
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        both = Both(process, stack, SIZE)
        both.pass_over()
        process.write([4, 9])
        both.pass_over()  # only now is it known to be written again and again
        process.write([4, 9])
        (changed,) = both.memory.changes(both.pause)
        piece = next(both.memory.pieces(0, changed))
        assert piece[0].tolist() == [4, 9]
        assert piece[2] is not None
        assert np.array_equal(piece[2], both.theirs[[4, 9]])


def test_memory_that_is_plugged_in_joins_with_the_pages_that_have_data() -> None:
    """The rest of it is zero on both sides, and what was known of other pages stays known."""
    half = SIZE // 2
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        ram = MemoryBlock("ram", MemoryRange(process.range.start, half * PAGE))
        more = MemoryBlock("more", MemoryRange(process.range.start + half * PAGE, half * PAGE))
        found = [ram]
        memory = TrackedMemory(process.held, lambda: found, stack)
        both = Both.of(process, memory)
        process.write([1, 2])
        for changed in memory.changes(both.pause):
            memory.sent(0, changed.whole, memory._read(0, changed.whole))
        process.write([3, half + 5])
        found = [more, ram]
        assert memory.blocks == (("ram", half * PAGE),)
        assert memory.look() == (("more", half * PAGE), ("ram", half * PAGE))
        memory.include(both.pause)
        assert memory.blocks == memory.look()
        process.write([4, half + 6])
        first, second = memory.begin().result()
        assert first.numbers.tolist() == [5, 6]
        assert second.numbers.tolist() == [3, 4]
        for index, changed in enumerate((first, second)):
            memory.sent(index, changed.numbers, changed.pages)
        process.write([half + 5])
        assert [one.numbers.tolist() for one in memory.begin().result()] == [[5], []]


def test_memory_that_cannot_be_tracked_leaves_the_rest_as_it_was() -> None:
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        found = [MemoryBlock("ram", process.range)]
        both = Both.of(process, TrackedMemory(process.held, lambda: found, stack))
        both.pass_over()
        found = [MemoryBlock("gone", MemoryRange(1 << 40, PAGE)), *found]
        both.memory.look()
        with pytest.raises(CannotTrack):
            both.memory.include(both.pause)
        process.write([7])
        assert both.epoch() == 1
        assert both.follows()


def test_memory_that_is_plugged_in_before_anything_is_tracked_needs_no_pause() -> None:
    with WrittenProcess(SIZE) as process, ExitStack() as stack:
        found: list[MemoryBlock] = [MemoryBlock("ram", MemoryRange(process.range.start, PAGE))]
        memory = TrackedMemory(process.held, lambda: found, stack)
        found = [MemoryBlock("ram", process.range)]
        memory.look()
        memory.include(_never)
        assert memory.blocks == (("ram", SIZE * PAGE),)


def _never(work: Callable[[], object]) -> None:
    raise AssertionError(work)


def test_what_the_backup_has_already_is_not_sent() -> None:
    with two_ends() as ends, WrittenProcess(SIZE) as process, ExitStack() as stack:
        process.write(range(0, SIZE, 2))
        near, far = ends.lines(stack)
        both = Both(process, stack, 10)
        there = mapped(ends.backup / "standby", SIZE, stack)
        there.pages[:] = ProcessMemory(process.held, [process.range]).read(0, np.array([[0, SIZE]]))
        there.pages[[10, 11]] = 9
        process.write([20])
        compared = compare(both.memory, near, far, lambda asked: answer(asked, [there]))
        assert compared == 3
        (changed,) = both.memory.changes(both.pause)
        assert changed.whole.tolist() == [10, 11, 20]


def compare(
    memory: TrackedMemory,
    near: PeerConnection,
    far: PeerConnection,
    tell: Callable[[PageRequest], Digests],
) -> int:
    def respond() -> None:
        while isinstance(asked := far.receive(SHORT), PageRequest):
            far.send(tell(asked))

    teller = threading.Thread(target=respond, daemon=True)
    teller.start()
    try:
        return memory.compare(near)
    finally:
        near.send(Digests(file=0, first=0, data=b""))
        teller.join()
