"""A protected guest's memory, whose changes the kernel reports; see `trackers`.

Neither a copy of the memory nor shared memory is needed, and the pause depends on the pages that
were written, not on the size of the memory.

Write protection is applied only while the guest is paused. QEMU has then completed all disk
requests. The kernel writes data that it reads with O_DIRECT to pages that it has pinned before,
and ignores their write protection; such a write to a page that was protected meanwhile would be
missed.

A page is *stale* if a scan has found it written, or if the backup may lack it, until it is sent. A
failed capture therefore loses nothing: the next capture copies all stale pages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory import memory_files, page_runs, ram_blocks
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Flags, Numbers
from vmckpt.capture.memory.process_memory import ProcessMemory
from vmckpt.capture.memory.ram_blocks import RamBlock, RamBlocks
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.model.epoch_cost import Finder
from vmckpt.replication.dirty_pages import trackers
from vmckpt.replication.dirty_pages.finder import Changed, Pages
from vmckpt.replication.dirty_pages.hot_pages import HotPages
from vmckpt.replication.primary.memory import Blocks, Pause, Piece, cut, differing
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.units import MIB
from vmckpt.util import thread_call

HOT = 64 * MIB >> 12
"""Default maximum number of pages whose last sent content is kept, so that only differences are
sent."""
HOT_MOVE = 1024 * MIB >> 12
"""The same maximum for a migration by epochs, which must catch up with the guest.

The memory is allocated as it is used.
"""
_ARENA = 64 * MIB >> 12
"""Maximum number of pages of a block for which memory is kept from one epoch to the next."""
_NONE: Numbers = np.zeros(0, dtype=np.intp)
_NO_PAGES: Pages = np.zeros((0, PAGE // 8), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """A block of the guest's memory in QEMU's address space."""

    name: str
    """ID of the block's memory backend, as in `query-memdev`; without a backend, QEMU's name of
    the block."""
    range: MemoryRange
    file: MemoryFile | None = None
    """The shared file that backs the block; None if the memory is private to QEMU."""


def blocks_of(found: RamBlocks, process: HeldProcess) -> list[MemoryBlock]:
    """Return the blocks to track: the guest's memory, then the private blocks.

    Raises OSError, for example if the process has ended.
    """
    maps = Path(f"/proc/{process.pid}/maps").read_text()

    def block(one: RamBlock) -> MemoryBlock:
        file = memory_files.shared_file(maps, process, one.range)
        return MemoryBlock(one.name.removeprefix(ram_blocks.OBJECTS), one.range, file)

    return [block(one) for one in (*found.guest, *found.private)]


@dataclass(slots=True)
class _Block:
    """What is known about one block of memory."""

    stale: Flags
    """Pages that were written since they were last sent, or that the backup may lack."""
    sent_once: Flags
    """Pages that the backup has had, with any content. Only these pages can become hot pages."""
    hot: HotPages
    arena: Pages
    """Memory for the pages that are copied during the pause."""


class TrackedMemory:
    """A guest's memory, tracked until `stack` is closed. See `memory.ProtectedMemory`."""

    def __init__(
        self, process: HeldProcess, find: Callable[[], Sequence[MemoryBlock]], stack: ExitStack, *,
        hot: int = HOT, finder: Finder = Finder.WRITE_TRACKING,
    ) -> None:  # fmt: skip
        """`find` returns the guest's blocks, see `blocks_of`. `hot`: see `HOT`. `finder`: one of
        `trackers.BEST_FIRST`. Raises CannotTrack, and any error of `find`."""
        self._process, self._find, self._hot = process, find, hot
        self._found = self._tracked = tuple(find())
        ranges = [one.range for one in self._tracked]
        self._writes = stack.enter_context(trackers.track(finder, process, ranges))
        # Every page counts as written until it is protected. What the backup has is not known.
        self._tracking = False
        self._blocks: list[_Block] = []
        self._use({})

    def _use(self, known: Mapping[MemoryRange, _Block]) -> None:
        """Prepare to read the tracked blocks. `known`: what is known about some of these blocks."""
        ranges = [one.range for one in self._tracked]
        self._memory = ProcessMemory(self._process, ranges)
        self._files = [one.file for one in self._tracked]
        total = sum(one.size for one in ranges)
        self._blocks = [
            known.get(one) or _block(one, self._hot * one.size // total) for one in ranges
        ]

    @property
    def blocks(self) -> Blocks:
        return tuple((one.name, one.range.size) for one in self._tracked)

    def look(self) -> Blocks:
        self._found = tuple(self._find())
        return tuple((one.name, one.range.size) for one in self._found)

    def include(self, pause: Pause) -> None:
        ranges = [one.range for one in self._tracked]
        known = dict(zip(ranges, self._blocks, strict=True))
        self._writes.extend([one.range for one in self._found])
        self._tracked = self._found
        self._use(known)
        if not self._tracking:
            return
        new = [index for index, one in enumerate(self._tracked) if one.range not in known]
        pause(lambda: self._begin_tracking(new))

    def _begin_tracking(self, new: Sequence[int]) -> None:
        """Begin to track new blocks while the guest is paused. `new`: numbers of these blocks."""
        populated = [self._populated(index) for index in new]
        self._mark_written()
        # All of their pages counted as written. Pages without data are zero, as on the backup.
        for index, flags in zip(new, populated, strict=True):
            self._blocks[index].stale = flags

    def track(self, pause: Pause) -> None:
        if not self._tracking:
            pause(self._writes.collect_all)
            self._tracking = True

    def prepare(self) -> None:
        """Do nothing: write protection can be applied only during the pause."""

    def begin(self) -> "Future[list[Changed]]":
        return thread_call.start(self._changes, name="scanning")

    def changes(self, pause: Pause) -> list[Changed]:
        pause(self._mark_written)
        return [
            Changed(numbers=_NONE, pages=_NO_PAGES, whole=np.flatnonzero(one.stale))
            for one in self._blocks
        ]

    def pieces(self, block: int, changed: Changed) -> Iterator[Piece]:
        one = self._blocks[block]
        yield from _differences(one, changed.numbers, changed.pages)
        for some in cut(changed.whole):
            yield from _differences(one, some, self._read(block, some))

    def sent(self, block: int, numbers: Numbers, pages: Pages) -> None:
        self._blocks[block].stale[numbers] = False
        self._blocks[block].sent_once[numbers] = True

    def flags(self, changed: Sequence[Changed]) -> list[Flags]:
        found = [one.stale.copy() for one in self._blocks]
        for flags, one in zip(found, changed, strict=True):
            flags[one.numbers] = True
        return found

    def doubt(self, flags: Sequence[Flags]) -> None:
        for block, one in zip(self._blocks, flags, strict=True):
            block.stale |= one
            block.hot.forget(one)

    def compare(self, line: PeerConnection) -> int:
        for index, block in enumerate(self._blocks):
            ours = partial(self._digests, index, self._populated(index))
            block.stale = differing(line, index, len(block.stale), ours)
            block.sent_once = ~block.stale
            block.hot.forget(np.ones(len(block.stale), dtype=np.bool_))
        return int(sum(np.count_nonzero(one.stale) for one in self._blocks))

    def _mark_written(self) -> None:
        """Mark the pages that the paused guest has written as stale. Raises CannotTrack."""
        try:
            found = self._writes.collect_all()
        except BaseException:  # what was found until then is not known
            for block in self._blocks:
                block.stale[:] = True
            raise
        for block, runs in zip(self._blocks, found, strict=True):
            block.stale[page_runs.numbers(runs)] = True

    def _changes(self) -> list[Changed]:
        self._mark_written()
        return [self._changed(index) for index in range(len(self._blocks))]

    def _changed(self, index: int) -> Changed:
        """Copy the stale pages of the paused guest.

        Returns these pages. `index`: number of the block.
        """
        block = self._blocks[index]
        found = np.flatnonzero(block.stale)
        if len(block.arena) < len(found) <= _ARENA:
            block.arena = np.empty((len(found) * 5 // 4, PAGE // 8), dtype=np.uint64)
        return Changed(numbers=found, pages=self._read(index, found, block.arena))

    def _read(self, index: int, some: Numbers, into: Pages | None = None) -> Pages:
        return self._memory.read(index, page_runs.of_numbers(some), into)

    def _populated(self, index: int) -> Flags:
        return self._memory.populated(index, self._files[index])

    def _digests(self, index: int, populated: Flags, first: int, end: int) -> NDArray[np.uint64]:
        found = np.full(end - first, page_codec.ZERO_DIGEST, dtype=np.uint64)
        for some in cut(np.flatnonzero(populated[first:end])):
            found[some] = page_codec.digests(self._read(index, some + first))
        return found


def _block(one: MemoryRange, hot: int) -> _Block:
    size = one.size // PAGE
    stale, sent = np.ones(size, dtype=np.bool_), np.zeros(size, dtype=np.bool_)
    return _Block(stale, sent, HotPages(size, hot), _NO_PAGES)


def _differences(block: _Block, found: Numbers, pages: Pages) -> Iterator[Piece]:
    """Yield pages in pieces, and remember the content of those that are sent again.

    Pages whose content on the backup is known are in other pieces than the rest.
    """
    for some in cut(np.arange(len(found))):
        # Looked up for each piece: remembering a page may displace another one.
        known = block.hot.known(found[some])
        for part, is_known in ((some[known], True), (some[~known], False)):
            if len(part):
                content, numbers = pages[part], found[part]
                again = block.sent_once[numbers]
                yield numbers, content, block.hot.content(numbers) if is_known else None
                block.hot.put(numbers[again], content[again])
