"""Parse QEMU's migration stream as it arrives, and write a stream that QEMU can load. Pure.

QEMU's docs/devel/migration describes the layout. The stream consists of numbered sections. Memory
consists of addresses with flags in their low bits, each followed by a page, or by one byte for a
zero page. The tail (device state and description) is kept unchanged. QEMU 7.2 to 10 write the same
format, except for one command with machine types of QEMU 10.
"""

import re
import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.qemu_stream import header as headers
from vmckpt.capture.qemu_stream.header import (
    CONTINUE,
    EOS,
    FLAGS,
    FULL_PAGE,
    PAGE,
    PART,
    ZERO,
    Head,
    NeedMore,
    damaged,
    readable,
)

Buffer = bytes | bytearray | memoryview
Addresses = NDArray[np.uint64]
Pages = NDArray[np.uint8]

_PAGE_RECORD, _ZERO_RECORD = 8 + PAGE, 8 + 1
# The longest record: a page with its block's name.
_LONGEST = 8 + 256 + PAGE
# Names of a guest's main memory, as chosen by QEMU and libvirt.
_MAIN_MEMORY = re.compile(r"pc\.ram|mach-virt\.ram|s390\.ram|ram-node[0-9]+")
# Number of records that are examined first at the start of a run; it doubles each time.
_FIRST_LOOK = 32
_LONGEST_LOOK = 1 << 14


class Sink(Protocol):
    """Receives the parts of a stream. Arrays and buffers are valid only during the call."""

    def begin(self, head: Head) -> None: ...

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        """Receive pages of one block. `data` has a row of 4096 bytes for each address."""

    def zeros(self, block: int, addresses: Addresses) -> None: ...

    def tail(self, data: memoryview) -> None:
        """Receive the next bytes of the device state."""


class StreamParser:
    """Parses a stream that arrives in buffers of any size, and passes its parts to a sink.

    Feed it a MiB or more at a time, since runs of pages are processed together. After a method has
    raised StreamDamaged, the parser cannot be used any more.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rest = b""
        self._offset = 0
        """Current offset from the start of the stream."""
        self._block = -1
        """Index of the block to which CONTINUE refers; -1 before the first page."""
        self._names: dict[bytes, int] = {}
        self._sizes: list[int] = []
        self._step: Callable[[memoryview], int] = self._head
        self.head: Head | None = None

    @property
    def flowing(self) -> bool:
        """Whether the first page, or the tail, has arrived."""
        return self._block >= 0 or self.in_tail

    @property
    def in_tail(self) -> bool:
        """Whether the memory is complete."""
        return self._step == self._tail

    def feed(self, data: Buffer) -> None:
        """Parse the next part of the stream. Raises StreamDamaged."""
        view = memoryview(data).cast("B")
        if self._rest:
            # Copy only the bytes that complete the cut record; the rest is parsed in place.
            cut = len(view) if self.head is None else min(len(view), _LONGEST)
            joined = self._rest + view[:cut]
            used = self._consume(memoryview(joined))
            if used < len(self._rest):
                self._rest = joined[used:] + bytes(view[cut:])
                return
            view = view[used - len(self._rest) :]
        used = self._consume(view)
        self._rest = bytes(view[used:])

    def finish(self) -> Head:
        """End the stream and return its header. Raises StreamDamaged if it is incomplete."""
        if self.head is None or not self.in_tail or self._rest:
            what = "header" if self.head is None else "memory"
            raise damaged(self._offset + len(self._rest), f"the stream ends within its {what}")
        return self.head

    def _consume(self, view: memoryview) -> int:
        """Parse as much as possible. Returns the number of bytes parsed."""
        at = 0
        while at < len(view):
            step = self._step
            try:
                used = step(view[at:])
            except NeedMore:
                break
            at += used
            self._offset += used
            if used == 0 and step == self._step:
                break
        return at

    def _head(self, view: memoryview) -> int:
        try:
            head, used = headers.parse_available_head(bytes(view[: headers.LONGEST_HEAD]))
        except NeedMore:
            if len(view) < headers.LONGEST_HEAD:
                raise
            raise damaged(0, f"the header is longer than {headers.LONGEST_HEAD} bytes") from None
        self.head = head
        self._names = {block.name.encode("ascii"): i for i, block in enumerate(head.blocks)}
        self._sizes = [block.size for block in head.blocks]
        self._sink.begin(head)
        self._step = self._section
        return used

    def _section(self, view: memoryview) -> int:
        """Parse the type of a section, and its number if it continues an earlier section.

        Returns the number of bytes parsed.
        """
        assert self.head is not None
        kind = view[0]
        if kind in (headers.FULL, headers.EOF):
            self._step = self._after_memory(kind)
            return 0
        if kind == headers.COMMAND:
            return self._command(view)
        if kind not in (PART, headers.END):
            raise damaged(self._offset, f"section of type {kind:#04x} between memory and devices")
        if len(view) < 5:
            raise NeedMore
        number = int.from_bytes(view[1:5], "big")
        if number != self.head.section:
            raise damaged(self._offset, f"part of section {number}, which has not started")
        self._step = self._memory
        return 5

    def _command(self, view: memoryview) -> int:
        """Skip the only command that may occur within memory.

        Returns its length. StreamWriter omits it.
        """
        told = bytes(view[: len(headers.SWITCHOVER_START)])
        if not headers.SWITCHOVER_START.startswith(told):
            raise damaged(self._offset, f"unknown command {told[1:].hex()}")
        if told != headers.SWITCHOVER_START:
            raise NeedMore
        return len(told)

    def _after_memory(self, kind: int) -> Callable[[memoryview], int]:
        """Return the function that parses the rest, which begins with a section of type `kind`.

        Subclasses for other streams with memory sections may return another function.
        """
        assert kind in (headers.FULL, headers.EOF)
        return self._tail

    def _footer(self, view: memoryview) -> int:
        assert self.head is not None
        reader = headers.Reader(bytes(view[:5]), base=self._offset)
        headers.check_footer(reader, self.head.section)
        self._step = self._section
        return reader.at

    def _tail(self, view: memoryview) -> int:
        self._sink.tail(view)
        return len(view)

    def _memory(self, view: memoryview) -> int:
        """Parse a record, or a run of records of the same kind. Returns the length in bytes."""
        if len(view) < 8:
            raise NeedMore
        flags = view[7] | (view[6] & 0x0F) << 8
        if flags == FULL_PAGE | CONTINUE:
            return self._run(view, _PAGE_RECORD, flags)
        if flags == ZERO | CONTINUE:
            return self._run(view, _ZERO_RECORD, flags)
        if flags == EOS:
            assert self.head is not None
            self._step = self._footer if self.head.footers else self._section
            return 8
        if flags in (FULL_PAGE, ZERO):
            return self._named(view, flags)
        raise damaged(self._offset, f"page with unknown flags {flags:#x}")

    def _named(self, view: memoryview, flags: int) -> int:
        """Parse a record that names its block. Returns its length in bytes. Raises NeedMore."""
        if len(view) < 9 or len(view) < 9 + view[8]:
            raise NeedMore
        body = 9 + view[8]
        name = bytes(view[9:body])
        if name not in self._names:
            shown = readable(name, self._offset)
            raise damaged(self._offset, f"page of block {shown!r}, which the header does not list")
        end = body + (PAGE if flags == FULL_PAGE else 1)
        if len(view) < end:
            raise NeedMore
        self._block = self._names[name]
        address = int.from_bytes(view[:8], "big") & ~FLAGS
        addresses = np.array([address], dtype=np.uint64)
        self._within(addresses)
        if flags == FULL_PAGE:
            page = np.frombuffer(view[body:end], dtype=np.uint8).reshape(1, PAGE)
            self._sink.pages(self._block, addresses, page)
        else:
            self._zeros(addresses, np.frombuffer(view[body:end], dtype=np.uint8))
        return end

    def _run(self, view: memoryview, record: int, flags: int) -> int:
        """Parse consecutive records of one kind in the same block.

        `record`: length of one record in bytes. Returns the total length. Raises NeedMore.
        """
        available = len(view) // record
        if not available:
            raise NeedMore
        if self._block < 0:
            raise damaged(self._offset, "page that continues a block before any block has started")
        look, found = _FIRST_LOOK, 0
        words = np.ndarray((available,), ">u8", view, 0, (record,))
        while found < min(available, _LONGEST_LOOK):
            piece = words[found : found + look]
            other = np.flatnonzero((piece & FLAGS) != flags)
            if len(other):
                found += int(other[0])
                break
            found += len(piece)
            look *= 2
        addresses = words[:found].astype(np.uint64) & np.uint64(~FLAGS & (1 << 64) - 1)
        self._within(addresses)
        if flags & FULL_PAGE:
            data: Pages = np.ndarray((found, PAGE), np.uint8, view, 8, (record, 1))
            self._sink.pages(self._block, addresses, data)
        else:
            self._zeros(addresses, np.ndarray((found,), np.uint8, view, 8, (record,)))
        return found * record

    def _zeros(self, addresses: Addresses, filling: NDArray[np.uint8]) -> None:
        if filling.any():
            raise damaged(self._offset, f"zero page filled with {int(filling.max()):#04x}")
        self._sink.zeros(self._block, addresses)

    def _within(self, addresses: Addresses) -> None:
        highest, size = int(addresses.max()), self._sizes[self._block]
        if highest >= size:
            raise damaged(self._offset, f"page at {highest:#x}, beyond a block of {size:#x} bytes")


class StreamWriter:
    """Writes a stream that QEMU can load. Call `opening`, write pages in any order, call `closing`.

    In a newly started QEMU, memory is zero, except where firmware was loaded. So write the zero
    pages of every block except the guest's main memory.
    """

    def __init__(self, head: Head, write: Callable[[Buffer], object]) -> None:
        self._head = head
        self._write = write
        self._names = {block.name for block in head.blocks}

    def opening(self, *, without_shared: bool = False) -> None:
        self._write(self._head.written(without_shared=without_shared))

    def pages(self, block: str, addresses: Addresses, data: Pages) -> None:
        """Write pages of a block; `data` has a row for each address."""
        records = np.empty((len(addresses), _PAGE_RECORD), dtype=np.uint8)
        records[:, 8:] = data
        self._section(block, addresses, records, FULL_PAGE)

    def zeros(self, block: str, addresses: Addresses) -> None:
        records = np.zeros((len(addresses), _ZERO_RECORD), dtype=np.uint8)
        self._section(block, addresses, records, ZERO)

    def closing(self, tail: Buffer) -> None:
        self._write(tail)

    def _section(
        self, block: str, addresses: Addresses, records: NDArray[np.uint8], flags: int
    ) -> None:
        if block not in self._names:
            raise ValueError(f"the stream's header has no block {block!r}")
        if not len(addresses):
            return
        words = addresses.astype(np.uint64) | np.uint64(flags | CONTINUE)
        records[:, :8] = words.astype(">u8").view(np.uint8).reshape(-1, 8)
        # The first record names the block, and the others continue it.
        name = block.encode("ascii")
        first = struct.pack(">QB", int(addresses[0]) | flags, len(name)) + name
        self._write(struct.pack(">BI", PART, self._head.section) + first)
        self._write(records.reshape(-1)[8:].data)
        self._write(self._head.section_end())


def starts_as_zeros(block: str) -> bool:
    """Return whether a block is all zeros in a QEMU that is waiting for a stream.

    Other blocks may contain firmware.
    """
    return _MAIN_MEMORY.fullmatch(block) is not None
