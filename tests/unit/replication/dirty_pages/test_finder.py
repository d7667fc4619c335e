import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.replication.dirty_pages.finder import Changed, CompareFinder

PAGES = 300
NUMBERS = st.sets(st.integers(0, PAGES - 1), max_size=80)


class Memory:
    """A guest's memory and its last copy, in files as both are."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.live, self.last = (self._file(folder / name, stack) for name in ("live", "last"))

    def _file(self, path: Path, stack: ExitStack) -> Mapping:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.ftruncate(opened, PAGES * PAGE)
            return stack.enter_context(Mapping(opened, PAGES * PAGE, write=True))
        finally:
            os.close(opened)

    def write(self, number: int, value: int) -> None:
        self.live.pages[number, 7] = value

    def find(self, finder: CompareFinder) -> Changed:
        finder.prepare()
        (found,) = finder.begin().result()
        return found

    def settle(self, found: Changed) -> None:
        """What the caller of a finder does with the pages that were copied aside."""
        self.last.pages[found.numbers] = found.pages
        self.last.written[found.numbers] = True


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Memory]:
    with ExitStack() as stack:
        yield Memory(tmp_path, stack)


def finder_of(memory: Memory, most: int = PAGES) -> CompareFinder:
    return CompareFinder([memory.live], [memory.last], most=most)


@settings(max_examples=50)
@given(epochs=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4), most=st.integers(0, PAGES))
def test_the_last_copy_follows_whatever_is_written(
    tmp_path_factory: pytest.TempPathFactory,
    epochs: list[tuple[set[int], set[int]]],
    most: int,
) -> None:
    with ExitStack() as stack:
        memory = Memory(tmp_path_factory.mktemp("memory"), stack)
        finder = stack.enter_context(finder_of(memory, most))
        for turn, (written, cleared) in enumerate(epochs, start=1):
            for number in written:
                memory.write(number, turn)
            for number in cleared:
                memory.live.pages[number] = 0
            before = memory.last.pages.copy()
            found = memory.find(finder)
            different = np.flatnonzero((before != memory.live.pages).any(axis=1))
            told = np.sort(np.concatenate([found.numbers, found.whole]))
            assert told.tolist() == different.tolist()
            assert found.count == len(different)
            assert (found.pages == memory.live.pages[found.numbers]).all()
            assert (memory.last.pages[found.numbers] == before[found.numbers]).all()
            memory.settle(found)
            assert (memory.last.pages == memory.live.pages).all()


def test_a_page_that_became_a_hole_is_told_as_zeros(memory: Memory) -> None:
    with finder_of(memory) as finder:
        memory.write(5, 1)
        memory.settle(memory.find(finder))
        os.truncate(memory.live.file, 0)
        os.truncate(memory.live.file, PAGES * PAGE)
        found = memory.find(finder)

    assert found.numbers.tolist() == [5]
    assert not found.pages.any()


def test_a_page_that_appears_after_the_preparation_is_found(memory: Memory) -> None:
    with finder_of(memory) as finder:
        finder.prepare()
        memory.write(9, 3)
        (found,) = finder.begin().result()

    assert found.numbers.tolist() == [9]


def test_no_more_is_kept_aside_than_may_be(memory: Memory) -> None:
    for number in range(PAGES):
        memory.write(number, 4)
    with finder_of(memory, most=100) as finder:
        found = memory.find(finder)

    assert len(found.pages) <= 100
    assert found.count == PAGES
    assert (memory.last.pages[found.whole] == memory.live.pages[found.whole]).all()
