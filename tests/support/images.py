"""Frozen images in other forms: a stream that QEMU loads, and a core."""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.image import FrozenImage
from vmckpt.capture.qemu_stream.devices import Processor
from vmckpt.capture.qemu_stream.elf_core import CoreWriter, Stretch
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.capture.qemu_stream.stream import Addresses, Buffer, StreamWriter, starts_as_zeros

_STEP = 1 << 20
# Pages of a MiB, read with one call.
_STRETCH = _STEP // PAGE


def addresses(numbers: NDArray[np.intp]) -> Addresses:
    """Where pages begin in their block."""
    return numbers.astype(np.uint64) * np.uint64(PAGE)


def write_stream(image: FrozenImage, write: Callable[[Buffer], object]) -> None:
    """Firmware's zero pages are told; those of main memory are there already."""
    writer = StreamWriter(image.head, write)
    writer.opening()
    for index, block in enumerate(image.blocks):
        present = image.present(index)
        if not starts_as_zeros(block.name):
            writer.zeros(block.name, addresses(np.flatnonzero(~present)))
        with image.file(index).open("rb", buffering=0) as file:
            for piece in _pieces(np.flatnonzero(present)):
                first, count = int(piece[0]), int(piece[-1] - piece[0]) + 1
                data = np.frombuffer(os.pread(file.fileno(), count * PAGE, first * PAGE), np.uint8)
                writer.pages(block.name, addresses(piece), data.reshape(-1, PAGE)[piece - first])
    writer.closing(image.tail())


def _pieces(numbers: NDArray[np.intp]) -> Iterator[NDArray[np.intp]]:
    """Ascending page numbers in pieces, each within a stretch of a MiB."""
    if len(numbers):
        edges = np.flatnonzero(np.diff(numbers // _STRETCH)) + 1
        yield from np.split(numbers, edges)


def write_core(
    file: int, image: FrozenImage, stretches: Sequence[Stretch], processors: Sequence[Processor]
) -> None:
    """All but holes."""
    writer = CoreWriter(file, stretches, processors)
    writer.begin()
    for index, block in enumerate(image.blocks):
        edges = np.flatnonzero(np.diff(image.present(index).astype(np.int8), prepend=0, append=0))
        with image.file(index).open("rb", buffering=0) as source:
            for first, last in list(pairwise(edges.tolist()))[::2]:
                for at in range(first * PAGE, last * PAGE, _STEP):
                    size = min(_STEP, last * PAGE - at)
                    data = os.pread(source.fileno(), size, at)
                    writer.memory(block.name, at, memoryview(data))
