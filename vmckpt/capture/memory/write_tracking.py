"""Find the pages that a running guest has written, without a copy of its memory or a restart.

A userfaultfd write-protects ranges of QEMU's memory. The first write to a protected page is
resolved in the kernel, which only marks the page as written (UFFD_FEATURE_WP_ASYNC). ioctl
PAGEMAP_SCAN on /proc/PID/pagemap returns the marked pages as runs, in about 1 ms per GiB of memory.
Both need Linux 6.7. Writes by KVM and by vhost go through QEMU's page tables and are found; writes
by a vhost-user process or a passed-through device are not.

The protection exists only while this process holds the descriptor: if the process dies, the kernel
removes it, and QEMU keeps running. See the kernel's Documentation/admin-guide/mm/userfaultfd.rst
and pagemap.rst.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Self

import numpy as np

from vmckpt.capture.memory.page_runs import NO_RUNS, Runs, merged
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import VmckptError
from vmckpt.hypervisor.qemu_process import userfaultfd
from vmckpt.hypervisor.qemu_process.injection import CannotInject
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_VERSION = 0xAA
# UFFD_FEATURE_WP_ASYNC, WP_UNPOPULATED, WP_HUGETLBFS_SHMEM
_FEATURES = 1 << 15 | 1 << 13 | 1 << 12
_MODE_WP = 2
_SCAN = 0xC0606610
_WRITTEN = 2
_SCAN_PROTECT, _SCAN_ASYNC_ONLY = 1, 2
_SCAN_ARGUMENTS = struct.Struct("<12Q")
_END_AT = 4
_FOUND = 1 << 16
"""Maximum number of runs that one call returns."""
_NEAR = 16
"""Runs of pages are protected together if at most this many pages are between them, since a call
costs as much as several pages."""
_MANY = 4096
"""With more runs than this, the whole range is protected in one call."""


class Why(Enum):
    """Why a guest's writes cannot be tracked."""

    OLD_KERNEL = "the kernel does not support write tracking; Linux 6.7 or later is needed"
    PAGE_SIZE = "the kernel's pages are larger than 4 KiB"
    NOT_PERMITTED = "QEMU is not permitted to create a userfaultfd"
    NO_SOFT_DIRTY = "the kernel does not support soft-dirty bits (CONFIG_MEM_SOFT_DIRTY)"
    NOT_ANONYMOUS = "the memory is in a file or huge pages, whose soft-dirty bits are not reliable"
    NO_ACCESS = "vmckpt is not permitted to read QEMU's page tables"
    IN_USE = "another vmckpt process is using QEMU's soft-dirty bits"
    CONFLICT = "another userfaultfd is tracking QEMU's memory, as for a snapshot or post-copy"
    NO_CALL = "no system call could be made in QEMU"
    NOT_WANTED = "another method was chosen"
    NOT_SUPPORTED = "QEMU cannot save its devices' state without its memory"
    NOT_FOUND = "the address of a block of memory is not known"
    GONE = "QEMU's memory mappings have changed, or cannot be read"
    ENDED = "QEMU has ended"


class CannotTrack(VmckptError):
    """The guest's writes are not tracked. QEMU runs as before."""

    exit_code = 10

    def __init__(self, process: int, why: Why, detail: str = "") -> None:
        self.reason = f"{why.value}{detail and f' ({detail})'}"
        super().__init__(f"process {process}: {self.reason}")
        self.why = why


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """A range of a process's memory, by virtual address.

    Its start and size must be multiples of 4096.
    """

    start: int
    size: int


class WriteTracking:
    """Tracks the writes to ranges of a process's memory. Use as `with WriteTracking(…) as writes`.

    At first, all pages count as written.
    """

    def __init__(
        self, process: HeldProcess, ranges: Sequence[MemoryRange], descriptor: int | None = None
    ) -> None:
        """`descriptor`: a userfaultfd that tracks these ranges already; it belongs to this object.

        Raises CannotTrack.
        """
        self._process = process
        self._ranges = tuple(ranges)
        self._found = np.zeros((_FOUND, 3), dtype=np.uint64)
        self._descriptor = self._pagemap = -1
        try:
            if descriptor is None:
                self._begin()
            else:
                self._descriptor = descriptor
                self._open_pagemap()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop tracking: the kernel removes the protection of all pages."""
        for descriptor in (self._descriptor, self._pagemap):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._pagemap = -1

    @property
    def descriptor(self) -> int:
        """The userfaultfd. The kernel removes the protection when its last duplicate is closed."""
        return self._descriptor

    def extend(self, ranges: Sequence[MemoryRange]) -> None:
        """Track `ranges` from now on. All pages of a range that was not tracked count as written.

        Raises CannotTrack; `scan` and `collect_all` then still cover the previous ranges.
        """
        self._register([one for one in ranges if one not in self._ranges])
        self._ranges = tuple(ranges)

    def scan(self) -> list[Runs]:
        """Return, for each range, the pages that were written since they were last protected.

        The pages stay marked as written. Raises CannotTrack.
        """
        return [self._scan(one, 0) for one in self._ranges]

    def collect_all(self) -> list[Runs]:
        """Like `scan`, but also protect the pages. Raises CannotTrack; some pages may then be
        protected already.

        The kernel finds and protects each page in one step, so no write in between is missed. The
        ioctl covers only ranges around written pages: under KVM, each call drops the mappings of
        its whole range, and the next access to each of these pages faults.
        """
        return [self._collect(one) for one in self._ranges]

    def _collect(self, one: MemoryRange) -> Runs:
        near = merged(self._scan(one, 0), _NEAR)
        if len(near) > _MANY:
            near = np.array([[near[0, 0], near[-1, 1]]])
        found = [
            self._scan(MemoryRange(one.start + first * PAGE, (end - first) * PAGE), _SCAN_PROTECT)
            + first
            for first, end in near.tolist()
        ]
        return _joined(found)

    def _begin(self) -> None:
        pid = self._process.pid
        if os.sysconf("SC_PAGESIZE") != PAGE:  # possible on arm64
            raise CannotTrack(pid, Why.PAGE_SIZE)
        try:
            _try_here()  # so that QEMU is not stopped if its kernel is too old
        except OSError as exc:
            if exc.errno != errno.ENOSYS:  # else QEMU's own call decides
                raise CannotTrack(pid, Why.OLD_KERNEL, exc.strerror or "") from exc
        try:
            self._descriptor = userfaultfd.create(self._process)
        except CannotInject as exc:
            raise CannotTrack(pid, Why.NO_CALL, exc.why.value) from exc
        except OSError as exc:
            raise self._refused(exc) from exc
        self._open_pagemap()
        try:
            enable(self._descriptor)
        except OSError as exc:  # EINVAL: an unknown feature
            raise CannotTrack(pid, Why.OLD_KERNEL, exc.strerror or "") from exc
        self._register(self._ranges)

    def _register(self, ranges: Sequence[MemoryRange]) -> None:
        try:
            for one in ranges:
                whole = struct.pack("<QQQQ", one.start, one.size, _MODE_WP, 0)
                fcntl.ioctl(self._descriptor, _REGISTER, whole)
        except OSError as exc:
            raise self._failed(exc) from exc

    def _open_pagemap(self) -> None:
        path = f"/proc/{self._process.pid}/pagemap"
        try:
            self._pagemap = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            why = Why.NO_ACCESS if self._process.lives() else Why.ENDED
            raise CannotTrack(self._process.pid, why, exc.strerror or "") from exc

    def _refused(self, error: OSError) -> CannotTrack:
        pid = self._process.pid
        if not self._process.lives():
            return CannotTrack(pid, Why.ENDED)
        old = error.errno == errno.ENOSYS
        return CannotTrack(pid, Why.OLD_KERNEL if old else Why.NOT_PERMITTED, error.strerror or "")

    def _scan(self, one: MemoryRange, how: int) -> Runs:
        found: list[Runs] = []
        at, end = one.start, one.start + one.size
        while at < end:
            asked = bytearray(_SCAN_ARGUMENTS.pack(
                _SCAN_ARGUMENTS.size, how | _SCAN_ASYNC_ONLY, at, end, 0, self._found.ctypes.data,
                _FOUND, 0, 0, _WRITTEN, 0, _WRITTEN,
            ))  # fmt: skip
            try:
                count = fcntl.ioctl(self._pagemap, _SCAN, asked)
            except OSError as exc:
                raise self._failed(exc) from exc
            addresses = self._found[:count, :2].astype(np.intp)
            found.append((addresses - one.start) // PAGE)
            at = _SCAN_ARGUMENTS.unpack(asked)[_END_AT]
        return _joined(found)

    def _failed(self, error: OSError) -> CannotTrack:
        pid = self._process.pid
        if not self._process.lives():
            return CannotTrack(pid, Why.ENDED)
        why = {
            errno.EBUSY: Why.CONFLICT, errno.ENOTTY: Why.OLD_KERNEL, errno.EPERM: Why.GONE,
        }.get(error.errno or 0, Why.GONE)  # fmt: skip
        return CannotTrack(pid, why, error.strerror or "")


def enable(descriptor: int) -> None:
    """Enable a userfaultfd for write tracking. Raises OSError if the kernel lacks a feature."""
    fcntl.ioctl(descriptor, _API, struct.pack("<QQQ", _VERSION, _FEATURES, 0))


def _try_here() -> None:
    """Enable a userfaultfd of this process for a moment. Raises OSError."""
    own = userfaultfd.of_this_process()
    try:
        enable(own)
    finally:
        os.close(own)


def _joined(found: list[Runs]) -> Runs:
    return np.concatenate(found) if found else NO_RUNS
