"""A protected guest's memory beside its last copy, and what of that the backup may not have."""

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
"""Pages whose digests are asked for at once."""
_ANSWER = Seconds(30.0)


class Memory:
    """Files of memory and copies of them, which stay for the next agent."""

    def __init__(self, files: Sequence[MemoryFile], folder: Path, stack: ExitStack) -> None:
        """Raises OSError."""
        self.live: list[Mapping] = []
        self.last: list[Mapping] = []
        for number, file in enumerate(files):
            self.live.append(_live(file, stack))
            copy = folder / f"last-{number}"
            self.last.append(_copy(copy, file.size, stack))
        self.stale: list[Flags] = [np.zeros(len(one.pages), dtype=np.bool_) for one in self.last]
        """Pages of which it is not known what the backup has."""

    def doubt(self, flags: Sequence[Flags]) -> None:
        """The backup may not have got these."""
        for stale, one in zip(self.stale, flags, strict=True):
            np.logical_or(stale, one, out=stale)

    def flags(self, changed: Sequence[Changed]) -> list[Flags]:
        """All pages that an epoch sends."""
        found = [stale.copy() for stale in self.stale]
        for flags, one in zip(found, changed, strict=True):
            flags[one.numbers] = True
            flags[one.whole] = True
        return found

    def compare(self, line: PeerConnection) -> int:
        """Ask the backup which pages it has; all others are stale. Returns how many those are.

        Raises ConnectionLost, WireError.
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
    """The backup's answer to such a question. Raises IndexError, ValueError: it makes no sense."""
    if wanted.file < 0:
        raise ValueError("a disk is no memory")
    pages = memory[wanted.file].pages
    if wanted.count > _ASKED or wanted.first + wanted.count > len(pages):
        raise ValueError(f"nobody has {wanted.count} pages from {wanted.first} on")
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
        # A hole that a full tmpfs cannot fill would kill us in the middle of an epoch.
        os.posix_fallocate(opened, 0, size)
        made = stack.enter_context(Mapping(opened, size, write=True))
        made.written = _not_zero(made) if before == size else np.zeros(size // PAGE, dtype=np.bool_)
        return made
    finally:
        os.close(opened)
