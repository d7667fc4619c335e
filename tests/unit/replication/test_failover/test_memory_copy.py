"""A second copy of memory that changes while it is copied."""

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from vmckpt.replication.test_failover import memory_copy
from vmckpt.replication.test_failover.memory_copy import ENOUGH, MOST, Next, Touched, decide


@dataclass
class Ram:
    pages: NDArray[np.uint64] = field(default_factory=lambda: np.zeros((0, 512), dtype=np.uint64))


def ram(*sizes: int) -> list[Ram]:
    return [Ram(np.zeros((size, 512), dtype=np.uint64)) for size in sizes]


def nothing(pages: int) -> None:
    del pages


@pytest.mark.parametrize(
    ("left", "rounds", "then"),
    [
        (0, 0, Next.CUT),
        (ENOUGH, 0, Next.CUT),
        (ENOUGH + 1, 0, Next.AGAIN),
        (10**9, 9, Next.AGAIN),
        (ENOUGH, 10, Next.CUT),
        (MOST, 10, Next.CUT),
        (MOST + 1, 10, Next.GIVE_UP),
        (MOST + 1, 500, Next.GIVE_UP),
    ],
)
def test_what_follows_a_round(left: int, rounds: int, then: Next) -> None:
    assert decide(left, rounds) is then


def test_only_the_pages_that_were_touched_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_copy, "_SLICE", 3)
    source, target = ram(10, 4), ram(10, 4)
    touched = Touched(source)
    for file, numbers in ((0, [1, 2, 3, 4]), (0, [9]), (1, [0, 2]), (0, [4])):
        touched(file, np.array(numbers, dtype=np.int64))
    for one in source:
        one.pages[:] = 7
    assert touched.count == 7
    told: list[int] = []
    memory_copy.copy(source, target, touched.take(), told.append)
    assert [np.flatnonzero(one.pages.any(axis=1)).tolist() for one in target] == [
        [1, 2, 3, 4, 9], [0, 2],
    ]  # fmt: skip
    assert told == [3, 2, 2]
    assert touched.count == 0


def test_a_copy_of_what_changes_meanwhile_is_right_once_the_rest_is_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_copy, "_SLICE", 5)
    source, target = ram(300, 41), ram(300, 41)
    touched = Touched(source)
    over = threading.Event()

    def change() -> None:
        dice = np.random.default_rng(5)
        while not over.is_set():
            file = int(dice.integers(2))
            numbers = dice.integers(len(source[file].pages), size=4)
            source[file].pages[numbers] = dice.integers(1 << 60, dtype=np.uint64)
            touched(file, numbers)

    writer = threading.Thread(target=change)
    writer.start()
    flags = memory_copy.all_pages(source)
    for _ in range(30):
        memory_copy.copy(source, target, flags, nothing)
        flags = touched.take()
    over.set()
    writer.join()
    memory_copy.copy(source, target, flags, nothing)
    memory_copy.copy(source, target, touched.take(), nothing)
    assert all(
        np.array_equal(one.pages, other.pages) for one, other in zip(source, target, strict=True)
    )
