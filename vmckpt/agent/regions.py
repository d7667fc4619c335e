"""What was captured, as regions of a snapshot."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vmckpt.checkpoint.disks import DiskReader, State
from vmckpt.checkpoint.image import FrozenImage
from vmckpt.store.regions import UNIT, Extent, Kind, What
from vmckpt.units import Bytes

_PAGE = UNIT[Kind.RAM]
_WHAT = {State.ZEROS: What.ZEROS, State.DATA: What.DATA, State.SAME: What.SAME}


class RamRegion:
    """One block of a frozen image. Use as a context manager."""

    kind = Kind.RAM

    def __init__(self, image: FrozenImage, number: int) -> None:
        block = image.blocks[number]
        self.name, self.size = block.name, Bytes(block.size)
        self._path: Path = image.file(number)
        self._present = image.present(number)
        self._file = -1

    def __enter__(self) -> "RamRegion":
        self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def extents(self) -> Iterator[Extent]:
        edges = np.flatnonzero(np.diff(self._present.view(np.int8))) + 1
        start = 0
        for end in [*edges.tolist(), len(self._present)]:
            what = What.DATA if self._present[start] else What.ZEROS
            yield Extent(start, end - start, what)
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
