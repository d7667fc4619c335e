"""What was captured, as regions of a snapshot."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.disks.reader import DiskReader, State
from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.memory.page_diff import Flags
from vmckpt.store.format.chunk_map import (
    UNIT,
    Extent,
    Kind,
    What,
)
from vmckpt.units import Bytes

_PAGE = UNIT[Kind.RAM]
_KINDS = (What.ZEROS, What.DATA, What.SAME)
_WHAT = {State.ZEROS: What.ZEROS, State.DATA: What.DATA, State.SAME: What.SAME}


class RamRegion:
    """One block of a frozen image. Use as a context manager."""

    kind = Kind.RAM

    def __init__(self, image: FrozenImage, number: int, changed: Flags | None = None) -> None:
        """`changed`: the only pages that are not as in the snapshot before; None: any may be."""
        block = image.blocks[number]
        self.name, self.size = block.name, Bytes(block.size)
        self._path: Path = image.file(number)
        # In the order of _KINDS.
        self._codes: NDArray[np.int8] = image.present(number).astype(np.int8)
        if changed is not None:
            self._codes[~changed & (self._codes == 1)] = 2
        self._file = -1

    def __enter__(self) -> "RamRegion":
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def extents(self) -> Iterator[Extent]:
        edges = np.flatnonzero(np.diff(self._codes)) + 1
        start = 0
        for end in [*edges.tolist(), len(self._codes)]:
            yield Extent(start, end - start, _KINDS[self._codes[start]])
            start = end

    def read(self, start: int, count: int) -> memoryview:
        data = os.pread(self._file, count * _PAGE, start * _PAGE)
        return memoryview(data.ljust(count * _PAGE, b"\0"))


class DiskRegion:
    """A disk of an open backup."""

    kind = Kind.DISK

    def __init__(self, reader: DiskReader) -> None:
        self.name, self.size = reader.name, reader.size
        self._reader = reader

    def extents(self) -> Iterator[Extent]:
        return (Extent(run.start, run.count, _WHAT[run.state]) for run in self._reader.runs())

    def read(self, start: int, count: int) -> memoryview:
        return self._reader.read(start, count)
