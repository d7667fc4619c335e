"""Remember the last sent content of pages that a guest writes often, in bounded memory.

The backup has exactly this content, so only the difference from it must be sent.
"""

import numpy as np

from vmckpt.capture.memory.page_diff import Flags, Numbers
from vmckpt.replication.dirty_pages.finder import Pages

_WORDS = 512


class HotPages:
    """The last sent content of at most `most` pages of one block of memory, `size` pages long.

    New pages replace those that were added first.
    """

    def __init__(self, size: int, most: int) -> None:
        self._slot = np.full(size, -1, dtype=np.int32)
        """Index of each page's content; negative: not remembered."""
        self._page = np.full(min(most, size), -1, dtype=np.intp)
        # The kernel allocates this memory as it is used.
        self._content: Pages = np.empty((len(self._page), _WORDS), dtype=np.uint64)
        self._next = 0

    def known(self, numbers: Numbers) -> Flags:
        """Return which of these pages are remembered."""
        return self._slot[numbers] >= 0

    def content(self, numbers: Numbers) -> Pages:
        """Return the content of pages that are remembered."""
        return self._content[self._slot[numbers]]

    def put(self, numbers: Numbers, pages: Pages) -> None:
        """Remember pages that were sent; if there are too many, only the last of them."""
        there = self.known(numbers)
        self._content[self._slot[numbers[there]]] = pages[there]
        new = np.flatnonzero(~there)[-len(self._page) :] if len(self._page) else np.zeros(0, int)
        if not len(new):
            return
        slots = (self._next + np.arange(len(new))) % len(self._page)
        self._next = (self._next + len(new)) % len(self._page)
        replaced = self._page[slots]
        self._slot[replaced[replaced >= 0]] = -1
        self._page[slots] = numbers[new]
        self._slot[numbers[new]] = slots
        self._content[slots] = pages[new]

    def forget(self, flags: Flags) -> None:
        """Forget the pages in `flags`, because their content on the backup is not known."""
        numbers = np.flatnonzero(flags & (self._slot >= 0))
        self._page[self._slot[numbers]] = -1
        self._slot[numbers] = -1
