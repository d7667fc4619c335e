"""A protected guest's memory, its last copy, and the pages that the backup may lack."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Flags, Mapping
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import Digests, PageRequest
from vmckpt.units import Seconds

_ASKED = 1 << 16
"""Pages whose digests are requested at once."""
_ANSWER = Seconds(30.0)


class Memory:
    """A guest's memory files and the last copy of each, which is kept for the next agent."""

    def __init__(self, files: Sequence[MemoryFile], folder: Path, stack: ExitStack) -> None:
        """Map the files and the copies in `folder` until `stack` is closed. Raises OSError."""
        self.live: list[Mapping] = []
        self.last: list[Mapping] = []
        for number, file in enumerate(files):
            self.live.append(_live(file, stack))
            copy = folder / f"last-{number}"
            self.last.append(_copy(copy, file.size, stack))
        self.stale: list[Flags] = [np.zeros(len(one.pages), dtype=np.bool_) for one in self.last]
        """For each file, the pages whose content on the backup is unknown."""

    def doubt(self, flags: Sequence[Flags]) -> None:
        """Mark the pages in `flags` as stale, since the backup may not have received them."""
        for stale, one in zip(self.stale, flags, strict=True):
            np.logical_or(stale, one, out=stale)

    def flags(self, changed: Sequence[Changed]) -> list[Flags]:
        """Return the pages that an epoch sends, for each file."""
        found = [stale.copy() for stale in self.stale]
        for flags, one in zip(found, changed, strict=True):
            flags[one.numbers] = True
            flags[one.whole] = True
        return found

    def compare(self, line: PeerConnection) -> int:
        """Compare the last copies with the backup's pages, and mark differing pages as stale.

        Returns the number of stale pages. Raises ConnectionLost, WireError.
        """
        for file, (last, stale) in enumerate(zip(self.last, self.stale, strict=True)):
            for first in range(0, len(stale), _ASKED):
                count = min(_ASKED, len(stale) - first)
                line.send(PageRequest(file=file, first=first, count=count))
                told = line.expect(Digests, _ANSWER)
                theirs = np.frombuffer(told.data, dtype=">u8")
                if (told.file, told.first, len(theirs)) != (file, first, count):
                    theirs = np.zeros(0, dtype=">u8")
                ours = page_codec.digests(last.pages[first : first + count])
                stale[first : first + count] = True if len(theirs) != count else ours != theirs
        return int(sum(stale.sum() for stale in self.stale))


def answer(wanted: PageRequest, memory: Sequence[Mapping]) -> Digests:
    """Return the backup's answer to a request for digests of memory pages.

    Raises IndexError, ValueError if the request is invalid.
    """
    if wanted.file < 0:
        raise ValueError("the request is for a disk, not for a memory file")
    pages = memory[wanted.file].pages
    if wanted.count > _ASKED or wanted.first + wanted.count > len(pages):
        raise ValueError(f"invalid request for {wanted.count} pages from page {wanted.first}")
    found = page_codec.digests(pages[wanted.first : wanted.first + wanted.count])
    return Digests(file=wanted.file, first=wanted.first, data=found.astype(">u8").tobytes())


def _not_zero(mapping: Mapping) -> Flags:
    found = np.zeros(len(mapping.pages), dtype=np.bool_)
    for first in range(0, len(found), _ASKED):
        found[first : first + _ASKED] = mapping.pages[first : first + _ASKED].any(axis=1)
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
