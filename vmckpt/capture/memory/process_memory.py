"""Read pages of a running QEMU's memory with process_vm_readv(2), whatever backs the memory."""

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory import page_diff, page_runs
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.capture.memory.page_runs import Runs
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

Pages = NDArray[np.uint64]
_WORDS = PAGE // 8
_MOST_RUNS = 1024
"""IOV_MAX: the maximum number of runs that one call reads."""
_PRESENT, _SWAPPED = np.uint64(1 << 63), np.uint64(1 << 62)
_ENTRIES = 1 << 18
"""Entries of pagemap that are read at once: 2 MiB."""


class ProcessMemory:
    """Ranges of a process's memory. The caller holds the process while reading."""

    def __init__(self, process: HeldProcess, ranges: Sequence[MemoryRange]) -> None:
        self._process = process
        self.ranges = tuple(ranges)

    def read(self, index: int, runs: Runs, into: Pages | None = None) -> Pages:
        """Read runs of pages of the range with this index.

        Returns the pages, shape (n, 512), in the order of the runs; `into` is used for them if it
        is large enough. Raises OSError.
        """
        count = page_runs.count(runs)
        if into is None or len(into) < count:
            into = np.empty((count, _WORDS), dtype=np.uint64)
        pages = into[:count]
        # struct iovec: address and length
        there = np.empty((len(runs), 2), dtype=np.uint64)
        there[:, 0] = self.ranges[index].start + runs[:, 0] * PAGE
        there[:, 1] = (runs[:, 1] - runs[:, 0]) * PAGE
        at = int(pages.ctypes.data)
        for first in range(0, len(there), _MOST_RUNS):
            some = there[first : first + _MOST_RUNS]
            at += self._readv(at, some)
        if not self._process.lives():
            raise ProcessLookupError(f"QEMU, process {self._process.pid}, has ended")
        return pages

    def populated(self, index: int, shared: MemoryFile | None = None) -> Flags:
        """Return, for each page of a range, whether it may have data; other pages are zeros.

        `shared`: the file that backs the range, which may have data that the process has not
        mapped; None: the memory is private. Raises OSError.
        """
        if shared is not None:
            opened = shared.open(os.O_RDONLY)
            try:
                return page_diff.held(opened, shared.size)
            finally:
                os.close(opened)
        one = self.ranges[index]
        flags = np.zeros(one.size // PAGE, dtype=np.bool_)
        file = os.open(f"/proc/{self._process.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            for first in range(0, len(flags), _ENTRIES):
                count = min(_ENTRIES, len(flags) - first)
                told = os.pread(file, 8 * count, (one.start // PAGE + first) * 8)
                entries = np.frombuffer(told, dtype=np.uint64)
                flags[first : first + count] = (entries & (_PRESENT | _SWAPPED)) != 0
        finally:
            os.close(file)
        return flags

    def _readv(self, at: int, there: NDArray[np.uint64]) -> int:
        """Read these ranges to address `at`. Returns the number of bytes. Raises OSError."""
        wanted = int(there[:, 1].sum())
        here = np.array([[at, wanted]], dtype=np.uint64)
        done = _library().process_vm_readv(
            self._process.pid, here.ctypes.data, 1, there.ctypes.data, len(there), 0
        )
        if done != wanted:
            error = ctypes.get_errno() if done < 0 else errno.EFAULT
            raise OSError(error, f"cannot read QEMU's memory: {os.strerror(error)}")
        return wanted


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.process_vm_readv.restype = ctypes.c_ssize_t
    library.process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong,
        ctypes.c_ulong,
    ]  # fmt: skip
    return library
