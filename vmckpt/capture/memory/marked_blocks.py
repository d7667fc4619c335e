"""Find blocks of memory in QEMU by the mark that each contains in its first page.

This works while libvirt starts QEMU, when the monitor cannot be used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess


@dataclass(frozen=True, slots=True)
class MemoryMapping:
    """A writable mapping of a process."""

    start: int
    end: int
    shared: bool
    offset: int
    """Offset in the mapped file."""
    inode: int
    """0: the memory is anonymous."""


def mappings(text: str) -> Iterator[MemoryMapping]:
    """Yield the writable mappings in /proc/PID/maps. Pure."""
    for line in text.splitlines():
        words = line.split()
        if words[1].startswith("rw"):
            start, end = (int(one, 16) for one in words[0].split("-"))
            yield MemoryMapping(start, end, words[1][3] == "s", int(words[2], 16), int(words[4]))


@dataclass(frozen=True, slots=True)
class Mark:
    """The content of a block's first page until the block is found."""

    name: str
    content: bytes
    size: int
    """Size of the block, in bytes."""


@dataclass(frozen=True, slots=True)
class MarkedBlock:
    """Where a block is in QEMU."""

    range: MemoryRange
    mapping: MemoryMapping


def find(process: HeldProcess, marks: Sequence[Mark]) -> dict[str, MarkedBlock]:
    """Return the blocks that were found by their marks, by block name. Raises OSError."""
    found: dict[str, MarkedBlock] = {}
    with Path(f"/proc/{process.pid}/mem").open("rb", buffering=0) as memory:
        for one in mappings(Path(f"/proc/{process.pid}/maps").read_text()):
            for mark in marks:
                if one.end - one.start < mark.size:
                    continue
                # A block begins where its mapping begins, unless the kernel has joined its mapping
                # with another one below. Above it, QEMU has a guard page.
                for start in {one.start, one.end - mark.size}:
                    if _reads(memory, start) == mark.content:
                        found[mark.name] = MarkedBlock(MemoryRange(start, mark.size), one)
    return found


def _reads(memory: FileIO, address: int) -> bytes:
    try:
        memory.seek(address)
        return memory.read(PAGE)
    except OSError:  # unmapped meanwhile, or not readable
        return b""
