"""QEMU's migration stream: read as it comes, and written anew so that QEMU loads it. Pure.

The layout is in QEMU's docs/devel/migration: sections, each with its number; memory as addresses
with flags in their low bits, each followed by a page or by the one byte of a zero page. The tail
(device state and description) is kept as it came. QEMU 7.2 to 10 write the same, but for one
command of machines of QEMU 10.
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
# The longest thing in the body: a page with its block's name.
_LONGEST = 8 + 256 + PAGE
# The names that QEMU and libvirt give to a guest's main memory.
_MAIN_MEMORY = re.compile(r"pc\.ram|mach-virt\.ram|s390\.ram|ram-node[0-9]+")
# So many records are looked at first when a run begins, then twice as many, and so on.
_FIRST_LOOK = 32
_LONGEST_LOOK = 1 << 14


class Sink(Protocol):
    """Takes what is in a stream. Arrays and buffers are valid only during the call."""

    def begin(self, head: Head) -> None: ...

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        """Pages of one block: `data` has a row of 4096 bytes for each address."""

    def zeros(self, block: int, addresses: Addresses) -> None: ...

    def tail(self, data: memoryview) -> None:
        """More of the device state."""


class StreamParser:
    """Takes a stream in blocks of any size and gives its parts to a sink.

    Feed it a MiB or more at a time: a run of pages is handled as one. Raises StreamDamaged, after
    which it is of no use any more.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rest = b""
        self._offset = 0
        """Of what is parsed now, in the whole stream."""
        self._block = -1
        """That CONTINUE means; none yet."""
        self._names: dict[bytes, int] = {}
        self._sizes: list[int] = []
        self._step: Callable[[memoryview], int] = self._head
        self.head: Head | None = None

    @property
    def flowing(self) -> bool:
        """Whether the first page has come."""
        return self._block >= 0 or self.in_tail

    @property
    def in_tail(self) -> bool:
        """Whether the memory is complete."""
        return self._step == self._tail

    def feed(self, data: Buffer) -> None:
        """Take the next block of the stream."""
        view = memoryview(data).cast("B")
        if self._rest:
            # Only as much as completes what was cut in two; the rest is parsed where it is.
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
        """The stream has ended. Raises StreamDamaged if it is not whole."""
        if self.head is None or not self.in_tail or self._rest:
            what = "head" if self.head is None else "memory"
            raise damaged(self._offset + len(self._rest), f"the end, in the middle of its {what}")
        return self.head

    def _consume(self, view: memoryview) -> int:
        """Parse what can be parsed; return how much that was."""
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
            head, used = headers.parse_head(bytes(view[: headers.LONGEST_HEAD]))
        except NeedMore:
            if len(view) < headers.LONGEST_HEAD:
                raise
            raise damaged(0, f"no memory within {headers.LONGEST_HEAD} bytes") from None
        self.head = head
        self._names = {block.name.encode("ascii"): i for i, block in enumerate(head.blocks)}
        self._sizes = [block.size for block in head.blocks]
        self._sink.begin(head)
        self._step = self._section
        return used

    def _section(self, view: memoryview) -> int:
        """The first byte of a section, and the number of one that goes on."""
        assert self.head is not None
        kind = view[0]
        if kind in (headers.FULL, headers.EOF):
            self._step = self._after_memory(kind)
            return 0
        if kind == headers.COMMAND:
            return self._command(view)
        if kind not in (PART, headers.END):
            raise damaged(self._offset, f"a section of type {kind:#04x} between memory and devices")
        if len(view) < 5:
            raise NeedMore
        number = int.from_bytes(view[1:5], "big")
        if number != self.head.section:
            raise damaged(self._offset, f"more of section {number}, which never began")
        self._step = self._memory
        return 5

    def _command(self, view: memoryview) -> int:
        """The one that may come in the middle of memory. Written anew, the stream is without it."""
        told = bytes(view[: len(headers.SWITCHOVER_START)])
        if not headers.SWITCHOVER_START.startswith(told):
            raise damaged(self._offset, f"a command {told[1:].hex()}, which is not known here")
        if told != headers.SWITCHOVER_START:
            raise NeedMore
        return len(told)

    def _after_memory(self, kind: int) -> Callable[[memoryview], int]:
        """What takes the rest, which begins with a section of this kind. For other streams that
        hold memory sections: a subclass may go on with something else."""
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
        """One record, or the run of records like it that begins here."""
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
        raise damaged(self._offset, f"a page with flags {flags:#x}, which is not known here")

    def _named(self, view: memoryview, flags: int) -> int:
        """A record that says of which block it is."""
        if len(view) < 9 or len(view) < 9 + view[8]:
            raise NeedMore
        body = 9 + view[8]
        name = bytes(view[9:body])
        if name not in self._names:
            shown = readable(name, self._offset)
            raise damaged(self._offset, f"a page of block {shown!r}, which is not in the list")
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
        """All records of one kind that follow each other in the same block."""
        available = len(view) // record
        if not available:
            raise NeedMore
        if self._block < 0:
            raise damaged(self._offset, "a page that goes on with a block, and none has begun")
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
            raise damaged(self._offset, f"a zero page filled with {int(filling.max()):#04x}")
        self._sink.zeros(self._block, addresses)

    def _within(self, addresses: Addresses) -> None:
        highest, size = int(addresses.max()), self._sizes[self._block]
        if highest >= size:
            raise damaged(self._offset, f"a page at {highest:#x} of a block of {size:#x} bytes")


class StreamWriter:
    """Writes a stream that QEMU loads: `opening`, then pages in any order, then `closing`.

    Pages that are never written are zero in a QEMU that was just started, but not where firmware
    was loaded: give the zeros of every block but the guest's main memory.
    """

    def __init__(self, head: Head, write: Callable[[Buffer], object]) -> None:
        self._head = head
        self._write = write
        self._names = {block.name for block in head.blocks}

    def opening(self, *, without_shared: bool = False) -> None:
        self._write(self._head.written(without_shared=without_shared))

    def pages(self, block: str, addresses: Addresses, data: Pages) -> None:
        """Pages of a block; `data` has a row for each address."""
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
            raise ValueError(f"no block {block!r} in this head")
        if not len(addresses):
            return
        words = addresses.astype(np.uint64) | np.uint64(flags | CONTINUE)
        records[:, :8] = words.astype(">u8").view(np.uint8).reshape(-1, 8)
        # The first one names the block; those after it go on with it.
        name = block.encode("ascii")
        first = struct.pack(">QB", int(addresses[0]) | flags, len(name)) + name
        self._write(struct.pack(">BI", PART, self._head.section) + first)
        self._write(records.reshape(-1)[8:].data)
        self._write(self._head.section_end())


def starts_as_zeros(block: str) -> bool:
    """Whether a block is all zeros in a QEMU that waits for a stream; others may hold firmware."""
    return _MAIN_MEMORY.fullmatch(block) is not None
