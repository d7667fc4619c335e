"""Chunks of a small snapshot's memory, in a store that can be silent."""

import threading

import numpy as np

from vmckpt.errors import StoreError
from vmckpt.store.assemble import Assembly
from vmckpt.store.format.chunk_map import SLOTS, ZERO, Kind

PAGES = 256
ZEROS = {*range(10, 20), *range(192, 256)}
"""Pages of the snapshot that are zeros: some in a group, and a whole group."""
EXPECTED = [0 if page in ZEROS else page + 1 & 0xFF for page in range(PAGES)]
"""The first byte of each page; all bytes of a page are equal."""


class Store:
    """Chunks, and whether the store returns them."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.read_chunks: list[int] = []

    def read(self, digest: bytes) -> bytes:
        """As store.assemble.Source."""
        if not self.answers.is_set():
            raise StoreError("near: no answer")
        number = digest[0]
        self.read_chunks.append(number)
        pages = [
            bytes([page + 1 & 0xFF]) * 4096 for page in range(number * SLOTS, (number + 1) * SLOTS)
        ]
        return b"".join(pages)

    def expect(self, digests: list[bytes]) -> None:
        """As store.assemble.Source."""


def content(store: Store) -> Assembly:
    """A block of memory in this store."""
    numbers = np.arange(PAGES, dtype=np.uint32)
    numbers[sorted(ZEROS)] = ZERO
    chunks = [bytes([number]) * 32 for number in range(PAGES // SLOTS)]
    return Assembly(Kind.RAM, PAGES * 4096, numbers, chunks, store)
