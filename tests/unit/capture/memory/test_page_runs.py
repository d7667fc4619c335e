"""Pages as runs."""

import numpy as np

from vmckpt.capture.memory import page_runs
from vmckpt.capture.memory.page_runs import NO_RUNS, merged, numbers


def test_numbers_of_pages_in_runs() -> None:
    runs = np.array([[3, 5], [9, 10]], dtype=np.intp)
    assert numbers(runs).tolist() == [3, 4, 9]
    assert numbers(np.zeros((0, 2), dtype=np.intp)).tolist() == []
    assert (page_runs.count(runs), page_runs.count(NO_RUNS)) == (3, 0)


def test_runs_that_are_near_each_other_are_merged() -> None:
    runs = np.array([[0, 1], [3, 5], [30, 31], [48, 50]])
    assert merged(runs, 2).tolist() == [[0, 5], [30, 31], [48, 50]]
    assert merged(runs, 17).tolist() == [[0, 5], [30, 50]]
    assert merged(runs[:0], 2).tolist() == []


def test_runs_consist_of_the_pages() -> None:
    pages = np.array([1, 2, 3, 7, 9, 10])
    flags = np.zeros(12, dtype=np.bool_)
    flags[pages] = True
    for runs in (page_runs.of_numbers(pages), page_runs.of_flags(flags)):
        assert runs.tolist() == [[1, 4], [7, 8], [9, 11]]
    assert page_runs.of_numbers(np.zeros(0, dtype=np.intp)).tolist() == []
    assert page_runs.of_flags(np.zeros(4, dtype=np.bool_)).tolist() == []
