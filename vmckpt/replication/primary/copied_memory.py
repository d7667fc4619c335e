"""A protected guest's memory files with a last copy of each, which is compared to find changes.

The last copy is kept on tmpfs for the next agent. It needs as much memory as the guest. Finding
changes takes time proportional to the memory size; see `tracked_memory` for a faster method.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Flags, Mapping, Numbers
from vmckpt.capture.memory.shared_memory import Comparison
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.replication.dirty_pages.finder import Changed, CompareFinder, Pages
from vmckpt.replication.primary.memory import ASKED, Blocks, Pause, Piece, cut, differing
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.units import MIB

ASIDE = 64 * MIB >> 12
"""Maximum number of pages per epoch whose old contents are kept to send only differences."""


class CopiedMemory:
    """A guest's memory files and the last copy of each. See `memory.ProtectedMemory`."""

    def __init__(
        self, find: Callable[[], Sequence[MemoryFile]], folder: Path, stack: ExitStack, *,
        aside: int = ASIDE,
    ) -> None:  # fmt: skip
        """Map the guest's files and the copies in `folder` until `stack` is closed.

        `find` returns the files; see `memory_files.files`. `aside`: maximum number of an epoch's
        pages to copy aside; see `CompareFinder`. Raises OSError, and any error of `find`.
        """
        self._find, self._folder, self._stack = find, folder, stack
        self._found: tuple[MemoryFile, ...] = tuple(find())
        self.live: list[Mapping] = []
        self.last: list[Mapping] = []
        self.stale: list[Flags] = []
        """For each file, the pages whose content on the backup is unknown."""
        self._names: list[str] = []
        self._use()
        self._finder = stack.enter_context(CompareFinder(self.live, self.last, most=aside))
        self.prepare = self._finder.prepare

    def _use(self) -> None:
        """Map the files that `look` found and that are not mapped yet. Raises OSError."""
        known = dict(zip(self._names, zip(self.live, self.last, self.stale, strict=True),
                         strict=True))  # fmt: skip
        for file in self._found:
            name = file.names[0]
            if name not in known:
                live = _live(file, self._stack)
                last = _copy(self._folder / f"last-{name}", file.size, self._stack)
                known[name] = live, last, np.zeros(len(last.pages), dtype=np.bool_)
        self._names = [file.names[0] for file in self._found]
        # The finder uses the same lists.
        self.live[:], self.last[:], self.stale[:] = zip(
            *(known[name] for name in self._names), strict=True
        )

    @property
    def blocks(self) -> Blocks:
        return tuple((name, one.size) for name, one in zip(self._names, self.live, strict=True))

    def look(self) -> Blocks:
        self._found = tuple(self._find())
        return tuple((file.names[0], file.size) for file in self._found)

    def include(self, _pause: Pause) -> None:
        self._use()

    def begin(self) -> Comparison[list[Changed]]:
        return self._finder.begin()

    def track(self, _pause: Pause) -> None:
        """Do nothing: comparing needs no tracking."""

    def changes(self, _pause: Pause) -> list[Changed]:
        self._finder.prepare()
        return self._finder.begin().result()

    def pieces(self, block: int, changed: Changed) -> Iterator[Piece]:
        last, stale = self.last[block], self.stale[block]
        unknown = stale[changed.numbers]
        for piece in cut(np.flatnonzero(~unknown)):
            numbers = changed.numbers[piece]
            yield numbers, changed.pages[piece], last.pages[numbers]
        for piece in cut(np.flatnonzero(unknown)):
            yield changed.numbers[piece], changed.pages[piece], None
        # The last copy already has the content of these pages.
        rest = stale.copy()
        rest[changed.numbers] = False
        rest[changed.whole] = True
        for numbers in cut(np.flatnonzero(rest)):
            yield numbers, last.pages[numbers], None

    def sent(self, block: int, numbers: Numbers, pages: Pages) -> None:
        last = self.last[block]
        last.pages[numbers] = pages
        last.written[numbers] = True
        self.stale[block][numbers] = False

    def flags(self, changed: Sequence[Changed]) -> list[Flags]:
        found = [stale.copy() for stale in self.stale]
        for flags, one in zip(found, changed, strict=True):
            flags[one.numbers] = True
            flags[one.whole] = True
        return found

    def doubt(self, flags: Sequence[Flags]) -> None:
        for stale, one in zip(self.stale, flags, strict=True):
            np.logical_or(stale, one, out=stale)

    def compare(self, line: PeerConnection) -> int:
        for block, stale in enumerate(self.stale):
            stale[:] = differing(line, block, len(stale), partial(self._digests, block))
        return int(sum(stale.sum() for stale in self.stale))

    def _digests(self, block: int, first: int, end: int) -> NDArray[np.uint64]:
        return page_codec.digests(self.last[block].pages[first:end])


def _not_zero(mapping: Mapping) -> Flags:
    found = np.zeros(len(mapping.pages), dtype=np.bool_)
    for first in range(0, len(found), ASKED):
        found[first : first + ASKED] = mapping.pages[first : first + ASKED].any(axis=1)
    return found


def _live(file: MemoryFile, stack: ExitStack) -> Mapping:
    opened = file.open(os.O_RDONLY)
    try:
        return stack.enter_context(Mapping(opened, file.size))
    finally:
        os.close(opened)


def _copy(path: Path, size: int, stack: ExitStack) -> Mapping:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        before = os.fstat(opened).st_size
        # On a full tmpfs, writing to a hole would kill this process during an epoch.
        os.posix_fallocate(opened, 0, size)
        made = stack.enter_context(Mapping(opened, size, write=True))
        made.written = _not_zero(made) if before == size else np.zeros(size // PAGE, dtype=np.bool_)
        return made
    finally:
        os.close(opened)
