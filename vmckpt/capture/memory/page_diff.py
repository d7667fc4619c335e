"""Find the pages of a guest's shared memory that differ from the last copy, at memory speed.

The C library first compares a stretch of pages, at memory speed. Only a stretch that differs is
compared page by page. Holes in a file are never read: reading would allocate them.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.qemu_stream.header import PAGE

Flags = NDArray[np.bool_]
Numbers = NDArray[np.intp]

_WORDS = PAGE // 8
# Pages compared by one call: 256 KiB.
_STRETCH = 64
# Pages that a thread takes at a time: 8 MiB.
_TASK = 2048
_MADV_POPULATE_READ = 22

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcmp.restype = ctypes.c_int


class Mapping:
    """A mapped memory file. Use as `with Mapping(file, size)`; `file` may be closed afterwards."""

    def __init__(self, file: int, size: int, *, write: bool = False) -> None:
        self.size = size
        self.file = os.dup(file)
        access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
        self._map = mmap.mmap(self.file, size, access=access)
        words = np.frombuffer(self._map, dtype=np.uint64)
        self.address = int(words.ctypes.data)
        self.pages: NDArray[np.uint64] = words.reshape(-1, _WORDS)
        self.written = self.held() if write else np.zeros(0, dtype=np.bool_)
        """Pages that may have data; empty without `write`. No other process writes to the file."""

    def populate(self, held: Flags) -> None:
        """Map the pages in `held`, so that a comparison causes no page faults."""
        for first, last in runs(held):
            with suppress(OSError):  # kernels before 5.14
                self._map.madvise(_MADV_POPULATE_READ, first * PAGE, (last - first) * PAGE)

    def held(self) -> Flags:
        """Like the function `held`."""
        return held(self.file, self.size)

    def __enter__(self) -> "Mapping":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        del self.pages
        with suppress(BufferError):  # an array of the mapped pages is still in use
            self._map.close()
        os.close(self.file)


def held(file: int, size: int) -> Flags:
    """Return, for each page of a file, whether the file has data for it; holes read as zeros."""
    flags = np.zeros(size // PAGE, dtype=np.bool_)
    at = 0
    while at < size:
        try:
            first = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # the rest of the file is a hole
            break
        at = os.lseek(file, first, os.SEEK_HOLE)
        flags[first // PAGE : -(-at // PAGE)] = True
    return flags


def runs(flags: Flags) -> list[tuple[int, int]]:
    """Return start and end (exclusive) of each run of True."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def bring_up(
    live: Mapping, last: Mapping, pool: ThreadPoolExecutor, *, expected: Flags | None = None
) -> Flags:
    """Make `last` equal to `live`. Returns, for each page, whether it had changed.

    The result is exact for pages that are not written meanwhile. New holes become zeros.
    `expected`: the pages with data in `live` a moment ago; their comparison starts immediately.
    Raises ValueError if the sizes differ.
    """
    if live.size != last.size:
        raise ValueError(f"cannot compare {live.size} bytes of memory with {last.size} bytes")
    begun = np.zeros(live.size // PAGE, dtype=np.bool_) if expected is None else expected
    work = _submit(live, last, pool, begun)
    held = live.held()
    work += _submit(live, last, pool, held & ~begun)
    changed = np.zeros(len(held), dtype=np.bool_)
    for task in work:
        changed[task.result()] = True
    gone = np.flatnonzero(last.written & ~held & ~begun)
    if len(gone):
        gone = gone[last.pages[gone].any(axis=1)]
        last.pages[gone] = 0
        changed[gone] = True
    last.written |= held | begun
    return changed


def _submit(
    live: Mapping, last: Mapping, pool: ThreadPoolExecutor, pages: Flags
) -> "list[Future[Numbers]]":
    return [pool.submit(_bring_up, live, last, first, end) for first, end in tasks(pages)]


def tasks(pages: Flags) -> Iterator[tuple[int, int]]:
    """Split the pages that are True into tasks for threads. Yields start and end (exclusive)."""
    for first, last in runs(pages):
        for start in range(first, last, _TASK):
            yield start, min(start + _TASK, last)


def _bring_up(live: Mapping, last: Mapping, first: int, end: int) -> Numbers:
    """Like `bring_up`, for a range of pages without holes. Returns the numbers of changed pages."""
    found = []
    for numbers in differing(live, last, first, end):
        last.pages[numbers] = live.pages[numbers]
        found.append(numbers)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.intp)


def differing(live: Mapping, last: Mapping, first: int, end: int) -> Iterator[Numbers]:
    """Yield the numbers of differing pages in a range without holes.

    The range is from page `first` to page `end` (exclusive).
    """
    for start in range(first, end, _STRETCH):
        stop = min(start + _STRETCH, end)
        offset, length = start * PAGE, (stop - start) * PAGE
        if _memcmp(live.address + offset, last.address + offset, length):
            different = (live.pages[start:stop] != last.pages[start:stop]).any(axis=1)
            yield np.flatnonzero(different) + start
