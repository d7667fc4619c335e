"""Serve pages that are still missing in the memory of a running QEMU.

A userfaultfd is registered for ranges of QEMU's memory. An access to a page that does not exist
there waits until the page is copied into QEMU. The registration lasts while any process has the
userfaultfd open. QEMU keeps it open: if the serving process dies, accesses wait, and another
process can take over. See the kernel's Documentation/admin-guide/mm/userfaultfd.rst.
"""

import ctypes
import errno
import os
import select
import struct
from collections.abc import Sequence
from typing import Self

from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process import userfaultfd
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess

_API, _REGISTER, _UNREGISTER = 0xC018AA3F, 0xC020AA00, 0x8010AA01
_WAKE, _COPY, _ZEROS = 0x8010AA02, 0xC028AA03, 0xC020AA04
_VERSION, _MISSING_IN_SHARED, _MODE_MISSING = 0xAA, 1 << 5, 1
_EVENT = struct.Struct("=B7xQQ8x")
_FAULT = 0x12
_EVENTS = 128
"""Maximum number of faults that are read at once."""


class MemoryGone(Exception):
    """QEMU has ended, or has unmapped the memory."""


class MissingPages:
    """Missing pages of a process's memory. Use as `with MissingPages(…) as pages`.

    `copy` and `fill_zeros` may be called from several threads. Leaving the block does not end the
    registration; `unregister` does.
    """

    def __init__(self, process: HeldProcess, number: int, ranges: Sequence[MemoryRange]) -> None:
        """`number`: the userfaultfd in the process. Raises OSError."""
        self._process = process
        self.ranges = tuple(ranges)
        self._library = ctypes.CDLL(None, use_errno=True)
        self._descriptor = userfaultfd.duplicate(process, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def register(self) -> None:
        """Let accesses to missing pages wait from now on.

        Raises OSError if the kernel does not support this for this kind of memory.
        """
        self._ask(_API, bytearray(struct.pack("=QQQ", _VERSION, _MISSING_IN_SHARED, 0)))
        for one in self.ranges:
            told = struct.pack("=QQQQ", one.start, one.size, _MODE_MISSING, 0)
            self._ask(_REGISTER, bytearray(told))

    def unregister(self) -> None:
        """From now on, missing pages are zeros. Raises OSError, MemoryGone."""
        for one in self.ranges:
            self._ask(_UNREGISTER, bytearray(struct.pack("=QQ", one.start, one.size)))

    def retry(self) -> None:
        """Let all waiting accesses report their faults again.

        Needed if the previous server died after it had read a fault. Raises OSError, MemoryGone.
        """
        for one in self.ranges:
            self._ask(_WAKE, bytearray(struct.pack("=QQ", one.start, one.size)))

    @property
    def descriptor(self) -> int:
        """The userfaultfd: it can be read when an access waits."""
        return self._descriptor

    def faults(self, within: float) -> list[int]:
        """Wait for faults, at most `within` seconds. Returns the addresses of the pages.

        Raises OSError, MemoryGone.
        """
        if not select.select([self._descriptor], [], [], within)[0]:
            return []
        try:
            raw = os.read(self._descriptor, _EVENTS * _EVENT.size)
        except BlockingIOError:
            return []
        found = dict.fromkeys(
            address & ~(PAGE - 1) for kind, _, address in _EVENT.iter_unpack(raw) if kind == _FAULT
        )
        return list(found)

    def copy(self, address: int, source: int, length: int) -> int:
        """Copy bytes from `source` in this process to missing pages at `address`.

        Pages that exist are left alone. Returns the number of pages that were copied. Raises
        OSError, MemoryGone.
        """
        copied = at = 0
        while at < length:
            told = _Copy(address + at, source + at, length - at, 0, 0)
            error = self._call(_COPY, ctypes.addressof(told))
            if error in (0, errno.EAGAIN) and told.copied > 0:
                copied += told.copied
                at += told.copied
            elif error == errno.EEXIST:
                self._wake(address + at, PAGE)
                at += PAGE
            elif error != errno.EAGAIN:  # EAGAIN: QEMU is changing its mappings at the moment
                raise self._failed(error)
        return copied // PAGE

    def fill_zeros(self, address: int, length: int) -> None:
        """Fill missing pages with zeros. Raises OSError, MemoryGone."""
        at = 0
        while at < length:
            told = _Zeros(address + at, length - at, 0, 0)
            error = self._call(_ZEROS, ctypes.addressof(told))
            if error in (0, errno.EAGAIN) and told.filled > 0:
                at += told.filled
            elif error == errno.EEXIST:
                self._wake(address + at, PAGE)
                at += PAGE
            elif error != errno.EAGAIN:
                raise self._failed(error)

    def _wake(self, address: int, length: int) -> None:
        self._ask(_WAKE, bytearray(struct.pack("=QQ", address, length)))

    def _ask(self, request: int, about: bytearray) -> None:
        raw = (ctypes.c_char * len(about)).from_buffer(about)
        error = self._call(request, ctypes.addressof(raw))
        if error:
            raise self._failed(error)

    def _call(self, request: int, at: int) -> int:
        """Make an ioctl with the structure at an address. Returns the error number, or 0."""
        done = self._library.ioctl(self._descriptor, ctypes.c_ulong(request), ctypes.c_void_p(at))
        return ctypes.get_errno() if done < 0 else 0

    def _failed(self, error: int) -> Exception:
        if error in (errno.ESRCH, errno.ENOENT) or not self._process.lives():
            return MemoryGone()
        return OSError(error, f"userfaultfd: {os.strerror(error)}")


class _Copy(ctypes.Structure):
    """`struct uffdio_copy`."""

    _fields_ = (
        ("to", ctypes.c_uint64), ("source", ctypes.c_uint64), ("length", ctypes.c_uint64),
        ("mode", ctypes.c_uint64), ("copied", ctypes.c_int64),
    )  # fmt: skip


class _Zeros(ctypes.Structure):
    """`struct uffdio_zeropage`."""

    _fields_ = (
        ("to", ctypes.c_uint64), ("length", ctypes.c_uint64), ("mode", ctypes.c_uint64),
        ("filled", ctypes.c_int64),
    )  # fmt: skip
