"""The memory of a snapshot, from which a family of forks gets its pages.

The forks access mostly the same pages. So a group of pages is read from the store once, at its
first use, and then stays in this process's memory.
"""

import mmap
from collections.abc import Mapping

import numpy as np

from vmckpt.capture.memory.missing_pages import MissingPages
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.store.assemble import Assembly
from vmckpt.store.format.chunk_map import GROUP, Kind

_GROUP = GROUP[Kind.RAM] * PAGE
_AROUND = 4 * PAGE
"""Bytes that one fault brings: neighbours are often needed next."""


class TemplateMemory:
    """The memory blocks of a snapshot. Not for use by several threads at once."""

    def __init__(self, blocks: Mapping[str, Assembly]) -> None:
        """`blocks`: the content of each block, by name."""
        self._content = dict(blocks)
        self._memory = {name: mmap.mmap(-1, one.size) for name, one in blocks.items()}
        self._address = {
            name: int(np.frombuffer(one, dtype=np.uint8).ctypes.data)
            for name, one in self._memory.items()
        }
        self._zeros = {
            name: np.ones(one.size // PAGE, dtype=np.bool_) for name, one in blocks.items()
        }
        self._read: set[tuple[str, int]] = set()

    def give(self, pages: MissingPages, where: MemoryRange, block: str, offset: int) -> int:
        """Copy the page at an offset of a block, and missing neighbours, to a process.

        `where`: the block in the process. Returns the number of copied pages. Raises StoreError,
        MemoryGone, OSError.
        """
        self._bring(block, offset // _GROUP)
        zeros = self._zeros[block]
        if zeros[offset // PAGE]:
            pages.fill_zeros(where.start + offset, PAGE)
            return 0
        first, copied = offset // _AROUND * _AROUND, 0
        for at in range(first, min(first + _AROUND, where.size), PAGE):
            if not zeros[at // PAGE]:
                copied += pages.copy(where.start + at, self._address[block] + at, PAGE)
        return copied

    def give_group(self, pages: MissingPages, where: MemoryRange, block: str, group: int) -> None:
        """Copy all missing pages of a group that are not zeros. Raises as `give` does."""
        self._bring(block, group)
        at = group * _GROUP
        for size, zeros in self._content[block].zeros(at, min(_GROUP, where.size - at)):
            if not zeros:
                pages.copy(where.start + at, self._address[block] + at, size)
            at += size

    def groups(self, block: str) -> range:
        """Return the numbers of a block's groups."""
        return range(-(-self._content[block].size // _GROUP))

    def _bring(self, block: str, group: int) -> None:
        """Read a group from the store, unless it was read already."""
        if (block, group) in self._read:
            return
        content, memory, at = self._content[block], self._memory[block], group * _GROUP
        for size, zeros in content.zeros(at, min(_GROUP, content.size - at)):
            if not zeros:
                memory[at : at + size] = content.read_bytes(at, size)
                self._zeros[block][at // PAGE : (at + size) // PAGE] = False
            at += size
        self._read.add((block, group))
