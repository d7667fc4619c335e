"""Sets of pages as runs. Pure."""

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.page_diff import Flags, Numbers

Runs = NDArray[np.intp]
"""Runs of pages: shape (n, 2), the first page and the end (exclusive), in ascending order."""
NO_RUNS: Runs = np.zeros((0, 2), dtype=np.intp)


def of_numbers(pages: Numbers) -> Runs:
    """Return the runs that consist of these pages, which must be in ascending order."""
    if not len(pages):
        return NO_RUNS
    apart = np.flatnonzero(np.diff(pages) != 1)
    starts, ends = np.append(0, apart + 1), np.append(apart, len(pages) - 1)
    return np.stack((pages[starts], pages[ends] + 1), axis=1)


def of_flags(flags: Flags) -> Runs:
    """Return the runs that consist of the pages whose flag is set."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return edges.reshape(-1, 2)


def merged(runs: Runs, near: int) -> Runs:
    """Return the runs, merging those that have at most `near` pages between them."""
    if not len(runs):
        return runs
    apart = np.flatnonzero(runs[1:, 0] - runs[:-1, 1] > near)
    starts, ends = np.append(0, apart + 1), np.append(apart, len(runs) - 1)
    return np.stack((runs[starts, 0], runs[ends, 1]), axis=1)


def count(runs: Runs) -> int:
    """Return the number of pages in runs."""
    return int((runs[:, 1] - runs[:, 0]).sum())


def numbers(runs: Runs) -> Numbers:
    """Return the numbers of all pages in runs, in ascending order."""
    lengths = runs[:, 1] - runs[:, 0]
    before = np.cumsum(lengths) - lengths
    found: Numbers = np.arange(count(runs)) + np.repeat(runs[:, 0] - before, lengths)
    return found
