"""Write a guest's memory as an ELF core file, like QEMU's dump-guest-memory, for crash and gdb.

The core has a segment for each stretch of guest-physical memory. The file is sparse: zeros are
holes. The processors' registers come from the device state.
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from vmckpt.capture.memory.image import write_all
from vmckpt.capture.qemu_stream.devices import Processor, Segment
from vmckpt.capture.qemu_stream.header import PAGE, RamBlock

_CORE, _X86_64 = 4, 62
_LOAD, _NOTE = 1, 4
_ELF = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT_HEADER = struct.Struct("<IIQQQQQQ")
_STATUS = 1
_USER_REGISTERS = ("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx",
                   "rdx", "rsi", "rdi", "rax", "rip", "cs", "rflags", "rsp", "ss", "fs.base",
                   "gs.base", "ds", "es", "fs", "gs")  # fmt: skip
_QEMU_REGISTERS = ("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rsp", "rbp",
                   *(f"r{n}" for n in range(8, 16)), "rip", "rflags")  # fmt: skip
_QEMU_SEGMENTS = ("cs", "ds", "es", "fs", "gs", "ss", "ldt", "tr", "gdt", "idt")


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a memory block, and its address in the guest."""

    block: str
    offset: int
    start: int
    """Guest-physical address at which the stretch starts."""
    size: int


def _joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yield the stretches, joining those that are adjacent both in their block and in the guest's
    memory.
    """
    last: Stretch | None = None
    for one in stretches:
        if last is not None and (one.block, one.offset, one.start) == (
            last.block, last.offset + last.size, last.start + last.size,
        ):  # fmt: skip
            last = Stretch(last.block, last.offset, last.start, last.size + one.size)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last


def usual_layout(blocks: Sequence[RamBlock], machine: str) -> tuple[Stretch, ...]:
    """Return the memory layout of an ordinary x86 guest: below and above the PCI hole.

    `blocks`: the main memory, in guest-physical order; `machine`: the machine type, such as
    "pc-q35-7.2".
    """
    size = sum(block.size for block in blocks)
    if "q35" in machine:
        low = 0x80000000 if size >= 0xB0000000 else 0xB0000000
    else:
        low = 0xC0000000 if size >= 0xE0000000 else 0xE0000000
    found, at = [], 0
    for block in blocks:
        below = min(block.size, max(0, low - at))
        if below:
            found.append(Stretch(block.name, 0, at, below))
        if below < block.size:
            start = (1 << 32) + max(0, at - low)
            found.append(Stretch(block.name, below, start, block.size - below))
        at += block.size
    return tuple(_joined(found))


class CoreWriter:
    """Writes a core to an open, empty file. Call `begin`, then `memory` in any order."""

    def __init__(
        self, file: int, stretches: Sequence[Stretch], processors: Sequence[Processor] = ()
    ) -> None:
        self._file = file
        self._stretches = stretches
        self._notes = b"".join(notes(n, one) for n, one in enumerate(processors))
        table = _ELF.size + _SEGMENT_HEADER.size * (len(stretches) + 1)
        first = -(-(table + len(self._notes)) // PAGE) * PAGE
        sizes = [0, *(stretch.size for stretch in stretches)]
        self._notes_at = table
        self._places = [first + sum(sizes[: n + 1]) for n in range(len(stretches))]
        self._end = first + sum(sizes)

    def begin(self) -> None:
        """Write everything but the memory. Raises OSError."""
        ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        count = len(self._stretches) + 1
        out = [
            _ELF.pack(ident, _CORE, _X86_64, 1, 0, _ELF.size, 0, 0, _ELF.size,
                      _SEGMENT_HEADER.size, count, 0, 0, 0),
            _SEGMENT_HEADER.pack(_NOTE, 0, self._notes_at, 0, 0, len(self._notes),
                                 len(self._notes), 0),
        ]  # fmt: skip
        for stretch, place in zip(self._stretches, self._places, strict=True):
            start, size = stretch.start, stretch.size
            out.append(_SEGMENT_HEADER.pack(_LOAD, 7, place, start, start, size, size, 0))
        os.ftruncate(self._file, self._end)
        write_all(self._file, memoryview(b"".join([*out, self._notes])), 0)

    def memory(self, block: str, offset: int, data: memoryview) -> None:
        """Write part of a RAM block to every guest address at which it is mapped.

        Bytes that are not mapped are dropped. `offset`: position of `data` in the block, in bytes.
        Raises OSError.
        """
        for stretch, place in zip(self._stretches, self._places, strict=True):
            first = max(offset, stretch.offset)
            last = min(offset + len(data), stretch.offset + stretch.size)
            if stretch.block == block and first < last:
                where = place + first - stretch.offset
                write_all(self._file, data[first - offset : last - offset], where)


def notes(number: int, processor: Processor) -> bytes:
    """Return a processor's notes: the standard note for debuggers, and QEMU's note for crash.

    `number`: number of the processor, from 0.
    """
    return _note(b"CORE\0", _STATUS, _status(number, processor)) + _note(
        b"QEMU\0", 0, _qemu(processor)
    )


def _note(name: bytes, kind: int, content: bytes) -> bytes:
    head = struct.pack("<III", len(name), len(content), kind)
    return (
        head
        + name.ljust(-(-len(name) // 4) * 4, b"\0")
        + content.ljust(-(-len(content) // 4) * 4, b"\0")
    )


def _status(number: int, processor: Processor) -> bytes:
    """Return the kernel's struct elf_prstatus: 112 bytes, 27 registers, and a flag."""
    values = []
    for name in _USER_REGISTERS:
        base, _, part = name.partition(".")
        if base in processor.segments:
            segment = processor.segments[base]
            values.append(segment.base if part else segment.selector)
        else:
            values.append(processor.registers[base])
    return struct.pack("<32xI76x27QI4x", number + 1, *values, 0)


def _qemu(processor: Processor) -> bytes:
    """Return QEMU's QEMUCPUState, version 1."""
    registers = processor.registers
    body = struct.pack("<18Q", *(registers[name] for name in _QEMU_REGISTERS))
    body += b"".join(_segment(processor.segments[name]) for name in _QEMU_SEGMENTS)
    control = (registers["cr0"], 0, registers["cr2"], registers["cr3"], registers["cr4"])
    body += struct.pack("<6Q", *control, registers["kernel_gs_base"])
    return struct.pack("<II", 1, 8 + len(body)) + body


def _segment(segment: Segment) -> bytes:
    return struct.pack(
        "<IIIIQ", segment.selector, segment.limit & 0xFFFFFFFF, segment.flags & 0xFFFFFFFF, 0,
        segment.base,
    )  # fmt: skip
