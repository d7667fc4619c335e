"""A protected guest's memory, and the pages that the backup may lack, for any method of finding
changed pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.page_diff import Flags, Mapping, Numbers
from vmckpt.capture.memory.shared_memory import Comparison
from vmckpt.replication.dirty_pages.finder import Changed, Pages
from vmckpt.replication.protocol import page_codec
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import Digests, PageRequest
from vmckpt.units import Seconds

ASKED = 1 << 16
"""Maximum number of pages whose digests are requested at once."""
MOST_PAGES = 2048
"""Maximum number of pages in one message: 8 MiB before compression."""
_ANSWER = Seconds(30.0)

Piece = tuple[Numbers, Pages, Pages | None]
"""Page numbers, the pages' content, and their content on the backup; None: it is not known."""


Blocks = tuple[tuple[str, int], ...]

Pause = Callable[[Callable[[], object]], None]
"""Calls a function while the guest is paused, as `epoch_capture.Capturer.pause` does."""


class ProtectedMemory(Protocol):
    """A guest's memory, in one or more blocks: `CopiedMemory` or `TrackedMemory`.

    For each epoch, call `prepare` while the guest is running, and `begin` once it is paused. Then
    send each piece of `pieces`, and report it to `sent`.
    """

    @property
    def blocks(self) -> Blocks:
        """Name and size of each block, in bytes."""

    def look(self) -> Blocks:
        """Find the blocks that the guest has now. Returns them as `blocks` does.

        Raises CannotTrack, CannotCapture, HypervisorError, OSError.
        """

    def include(self, pause: Pause) -> None:
        """From now on, use the blocks that `look` found: the previous blocks and new blocks.

        The new blocks are zero on the backup. Raises CannotTrack, HypervisorError, OSError.
        """

    def track(self, pause: Pause) -> None:
        """Start tracking changes, if this is necessary and has not been done yet.

        Call this before `begin`, `changes` and `compare`. `pause` is used only if tracking can
        start only while the guest is paused. Raises CannotTrack, HypervisorError.
        """

    def prepare(self) -> None:
        """Prepare the search as far as possible before the pause."""

    def begin(self) -> Comparison[list[Changed]]:
        """Start the search for changed pages of the paused guest, one entry for each block.

        The memory must not change until the result is available.
        """

    def changes(self, pause: Pause) -> list[Changed]:
        """Return the changed pages of the running guest, for a pass of the first copy.

        A page that the guest writes meanwhile is found again by the next search.
        """

    def pieces(self, block: int, changed: Changed) -> Iterator[Piece]:
        """Yield what must be sent, in pieces of at most `MOST_PAGES` pages."""

    def sent(self, block: int, numbers: Numbers, pages: Pages) -> None:
        """Record that these pages were sent."""

    def flags(self, changed: Sequence[Changed]) -> list[Flags]:
        """Return the pages that an epoch sends, for each block."""

    def doubt(self, flags: Sequence[Flags]) -> None:
        """Mark the pages in `flags` as stale, since the backup may not have received them."""

    def compare(self, line: PeerConnection) -> int:
        """Compare the memory with the backup's pages, and mark differing pages as stale.

        Returns the number of stale pages. Raises ConnectionLost, WireError.
        """


def cut(numbers: Numbers) -> Iterator[Numbers]:
    """Yield `numbers` in pieces of at most `MOST_PAGES`."""
    for begin in range(0, len(numbers), MOST_PAGES):
        yield numbers[begin : begin + MOST_PAGES]


def differing(
    line: PeerConnection, block: int, size: int, ours: Callable[[int, int], NDArray[np.uint64]]
) -> Flags:
    """Compare the digests of a block's pages with the backup's. Returns the pages that differ.

    `size`: in pages. `ours` returns our digests of the pages from the first to the second number
    (exclusive). Raises ConnectionLost, WireError.
    """
    found = np.ones(size, dtype=np.bool_)
    for first in range(0, size, ASKED):
        end = min(first + ASKED, size)
        line.send(PageRequest(file=block, first=first, count=end - first))
        told = line.expect(Digests, _ANSWER)
        theirs = np.frombuffer(told.data, dtype=">u8")
        if (told.file, told.first, len(theirs)) == (block, first, end - first):
            found[first:end] = ours(first, end) != theirs
    return found


def answer(wanted: PageRequest, memory: Sequence[Mapping]) -> Digests:
    """Return the backup's answer to a request for digests of memory pages.

    Raises IndexError, ValueError if the request is invalid.
    """
    if wanted.file < 0:
        raise ValueError("the request is for a disk, not for a memory file")
    pages = memory[wanted.file].pages
    if wanted.count > ASKED or wanted.first + wanted.count > len(pages):
        raise ValueError(f"invalid request for {wanted.count} pages from page {wanted.first}")
    found = page_codec.digests(pages[wanted.first : wanted.first + wanted.count])
    return Digests(file=wanted.file, first=wanted.first, data=found.astype(">u8").tobytes())
