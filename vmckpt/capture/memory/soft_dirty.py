"""Find the pages that a running guest has written, by the kernel's soft-dirty bits.

Writing 4 to /proc/PID/clear_refs clears the soft-dirty bits of all pages of a process; a write to a
page sets its bit again, which is bit 55 in /proc/PID/pagemap. This needs CONFIG_MEM_SOFT_DIRTY, but
not Linux 6.7, and makes no system call in QEMU. Compared with `write_tracking`:

* A clear affects the whole process. Only one program can use the bits of a process; a lock keeps
  other vmckpt processes away, but not other programs, such as CRIU.
* Reading and clearing are two steps, so pages may be collected only while the guest is paused.
* Only private memory without a file can be tracked: the kernel drops the bits of shared pages when
  it unmaps these, and has none for hugetlbfs.
* An entry of 8 bytes is read for each page, and KVM has to map all of the guest's memory again
  after each clear.

See the kernel's Documentation/admin-guide/mm/soft-dirty.rst.
"""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory import page_runs
from vmckpt.capture.memory.page_runs import Runs
from vmckpt.capture.memory.write_tracking import CannotTrack, MemoryRange, Why
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

PROC = Path("/proc")
_ENTRY = 8
_WRITTEN = np.uint64(1 << 55)
_PLACE = np.uint64(1 << 63 | 1 << 62 | (1 << 55) - 1)
"""Bits of an entry that show whether a page is in memory or swapped out, and where."""
_CLEAR = b"4"

Entries = NDArray[np.uint64]
"""Entries of pagemap, one for each page."""


class SoftDirty:
    """Tracks the writes to ranges of a process's memory. Use as `with SoftDirty(…) as writes`.

    At first, all pages count as written. See `write_tracking.WriteTracking`, which has the same
    methods.
    """

    def __init__(
        self, process: HeldProcess, ranges: Sequence[MemoryRange], *, proc: Path = PROC
    ) -> None:
        """`proc`: the root of the proc file system. Raises CannotTrack."""
        self._process = process
        self._ranges = tuple(ranges)
        self._before: list[Entries] | None = None
        """The entries when the bits were last cleared; None: the bits are not cleared yet."""
        self._pagemap = self._clear_refs = -1
        self._folder = proc / str(process.pid)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop tracking. The kernel keeps setting bits, which costs nothing."""
        for descriptor in (self._pagemap, self._clear_refs):
            if descriptor >= 0:
                os.close(descriptor)
        self._pagemap = self._clear_refs = -1

    def extend(self, ranges: Sequence[MemoryRange]) -> None:
        """Track `ranges` from now on. All pages of a range that was not tracked count as written.

        Raises CannotTrack; the tracked ranges are then unchanged.
        """
        self._require_anonymous([one for one in ranges if one not in self._ranges])
        if self._before is not None:
            known = dict(zip(self._ranges, self._before, strict=True))
            # No entry is like this, so that all pages of a new range differ from it.
            self._before = [
                known[one] if one in known else np.full(one.size // PAGE, _PLACE, dtype=np.uint64)
                for one in ranges
            ]
        self._ranges = tuple(ranges)

    def scan(self) -> list[Runs]:
        """Return, for each range, the pages that were written since the last collection.

        The pages stay marked as written. Raises CannotTrack.
        """
        return self._written(self._entries())

    def collect_all(self) -> list[Runs]:
        """Like `scan`, but also clear the bits. Call this only while the guest is paused.

        A write between reading and clearing is missed. Raises CannotTrack.
        """
        # All ranges are read before the first bit is cleared: a clear affects all of them.
        now = self._entries()
        written = self._written(now)
        try:
            clear(self._clear_refs)
        except OSError as exc:
            raise self._failed(exc) from exc
        self._before = now
        return written

    def _begin(self) -> None:
        pid, folder = self._process.pid, self._folder
        if not is_supported():
            raise CannotTrack(pid, Why.NO_SOFT_DIRTY)
        try:
            # Both calls need the permission to trace QEMU.
            self._pagemap = os.open(folder / "pagemap", os.O_RDONLY | os.O_CLOEXEC)
            self._clear_refs = os.open(folder / "clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise self._failed(exc) from exc
        try:
            fcntl.flock(self._clear_refs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise CannotTrack(pid, Why.IN_USE) from exc
        self._require_anonymous(self._ranges)

    def _require_anonymous(self, ranges: Sequence[MemoryRange]) -> None:
        try:
            maps = (self._folder / "maps").read_text()
        except OSError as exc:
            raise self._failed(exc) from exc
        if not all(is_anonymous(maps, one) for one in ranges):
            raise CannotTrack(self._process.pid, Why.NOT_ANONYMOUS)

    def _entries(self) -> list[Entries]:
        try:
            return [_read(self._pagemap, one) for one in self._ranges]
        except OSError as exc:
            raise self._failed(exc) from exc

    def _written(self, entries: Sequence[Entries]) -> list[Runs]:
        if self._before is None:
            return [np.array([[0, len(now)]], dtype=np.intp) for now in entries]
        # A page that QEMU discards, for a balloon, is then zero, but has no soft-dirty bit.
        return [
            page_runs.of_flags((now & _WRITTEN | (now ^ before) & _PLACE) != 0)
            for now, before in zip(entries, self._before, strict=True)
        ]

    def _failed(self, error: OSError) -> CannotTrack:
        pid = self._process.pid
        if not self._process.lives():
            return CannotTrack(pid, Why.ENDED)
        if isinstance(error, PermissionError):
            return CannotTrack(pid, Why.NO_ACCESS, error.strerror or "")
        return CannotTrack(pid, Why.GONE, error.strerror or "")


def clear(clear_refs: int) -> None:
    """Clear the soft-dirty bits of a process. Raises OSError."""
    os.pwrite(clear_refs, _CLEAR, 0)


def is_supported() -> bool:
    """Return whether the kernel sets soft-dirty bits. Clears the bits of this process.

    Without CONFIG_MEM_SOFT_DIRTY, a kernel accepts the clear, but never sets a bit.
    """
    try:
        pagemap = os.open(PROC / "self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _sets_bits(pagemap)
        finally:
            os.close(pagemap)
    except OSError:
        return False


def _sets_bits(pagemap: int) -> bool:
    page = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.c_char.from_buffer(page)
    one = MemoryRange(ctypes.addressof(first), PAGE)
    seen = []
    page[0] = 1
    for write in (False, True):
        clear_refs = os.open(PROC / "self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            clear(clear_refs)
        finally:
            os.close(clear_refs)
        if write:
            page[0] = 2
        seen.append(bool(_read(pagemap, one)[0] & _WRITTEN))
    del first
    page.close()
    return seen == [False, True]


def is_anonymous(maps: str, one: MemoryRange) -> bool:
    """Return whether a range has mappings, all of them private and without a file. Pure.

    `maps`: the text of /proc/PID/maps.
    """
    found = False
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in words[0].split("-"))
        if start < one.start + one.size and one.start < end:
            if not words[1].endswith("p") or words[4] != "0":
                return False
            found = True
    return found


def _read(pagemap: int, one: MemoryRange) -> Entries:
    entries = np.empty(one.size // PAGE, dtype=np.uint64)
    rest, at = entries.data.cast("B"), one.start // PAGE * _ENTRY
    while rest:
        count = os.preadv(pagemap, [rest], at)
        if not count:
            raise ProcessLookupError("QEMU has ended")
        rest, at = rest[count:], at + count
    return entries
