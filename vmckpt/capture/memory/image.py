"""The frozen image: a guest's memory and device state at one instant, as files on its host.

An image is a directory with a sparse file and a page map for each memory block, and the header and
tail of QEMU's stream. The image is complete once `image.json` exists.
"""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.qemu_stream import devices
from vmckpt.capture.qemu_stream.header import PAGE, Head, RamBlock, parse_head
from vmckpt.capture.qemu_stream.stream import Addresses, Pages
from vmckpt.errors import CaptureFailed

_FORMAT = 1
INDEX, HEAD, TAIL = "image.json", "head", "tail"


class ImageWriter:
    """A `stream.Sink` that writes the parts of a stream to a directory."""

    def __init__(self, folder: Path, *, made: bool = False) -> None:
        """`made`: the directory already exists; otherwise, it is created. Raises OSError."""
        if not made:
            folder.mkdir(mode=0o700)
        self.folder = folder
        self.done = 0
        """Bytes of memory received, including zeros."""
        self.total = 0
        self._head: Head | None = None
        self._files: list[int] = []
        self._present: list[NDArray[np.bool_]] = []
        self._tail = os.open(folder / TAIL, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def begin(self, head: Head) -> None:
        self._head = head
        (self.folder / HEAD).write_bytes(head.written(without_shared=head.without_shared))
        for index, block in enumerate(head.blocks):
            path = self.folder / _file(index)
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            os.ftruncate(self._files[-1], block.size)
            self._present.append(np.zeros(block.size // PAGE, dtype=np.bool_))
        self.total = sum(block.size for block in head.blocks)

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        """Write pages with data. Each run of adjacent pages is written by one call.

        `block`: number of the block in the header; `addresses`: ascending offsets of the pages in
        the block, in bytes; `data`: one row for each page. Raises OSError.
        """
        whole = np.ascontiguousarray(data).reshape(-1).data
        breaks = np.flatnonzero(np.diff(addresses) != PAGE) + 1
        edges = [0, *breaks.tolist(), len(addresses)]
        for first, last in pairwise(edges):
            where = int(addresses[first])
            write_all(self._files[block], whole[first * PAGE : last * PAGE], where)
        self._present[block][addresses // PAGE] = True
        self.done += len(addresses) * PAGE

    def zeros(self, block: int, addresses: Addresses) -> None:
        """Record zero pages. Most are holes already; pages with earlier data are overwritten.

        `block`, `addresses`: see `pages`. Raises OSError.
        """
        numbers = addresses // PAGE
        for number in numbers[self._present[block][numbers]].tolist():
            write_all(self._files[block], memoryview(bytes(PAGE)), number * PAGE)
        self._present[block][numbers] = False
        self.done += len(addresses) * PAGE

    def tail(self, data: memoryview) -> None:
        write_all(self._tail, data, None)

    def finish(self, unread: Sequence[NDArray[np.bool_]] = ()) -> "FrozenImage":
        """Close the files and return the image. The stream must have been parsed completely.

        `unread`: for each block, pages that are not in the image and may have data.
        Raises CaptureFailed if the stream had no memory, StreamDamaged if its tail is damaged, and
        OSError.
        """
        if self._head is None:
            raise CaptureFailed("QEMU's stream contains no memory", hint="try again")
        self.close()
        files = [_file(index) for index in range(len(self._present))]
        present = [a | b for a, b in zip(self._present, unread, strict=True)] if unread else None
        return complete(self.folder, self._head, files, present or self._present)

    def close(self) -> None:
        """Close the files; may be repeated."""
        files, self._files = [*self._files, self._tail], []
        self._tail = -1
        for file in files:
            if file >= 0:
                os.close(file)

    def remove(self) -> None:
        self.close()
        remove(self.folder)


def _file(block: int) -> str:
    return f"ram-{block}"


def complete(
    folder: Path, head: Head, files: Sequence[str], present: Sequence[NDArray[np.bool_]]
) -> "FrozenImage":
    """Complete an image whose directory has the header, the tail and a file for each block.

    `present`: for each block, the pages that may have data. Raises StreamDamaged if the tail is
    damaged, CaptureFailed, OSError.
    """
    devices.check_tail((folder / TAIL).read_bytes(), described=head.footers)
    for name, flags in zip(files, present, strict=True):
        (folder / f"{name}.present").write_bytes(np.packbits(flags).tobytes())
    blocks = [
        {"name": block.name, "size": block.size, "file": name}
        for block, name in zip(head.blocks, files, strict=True)
    ]
    partial = folder / f"{INDEX}.new"
    partial.write_text(json.dumps({"format": _FORMAT, "blocks": blocks}))
    partial.rename(folder / INDEX)
    return FrozenImage.open(folder)


def write_all(file: int, data: memoryview, offset: int | None) -> None:
    """Write all data to an open file. Raises OSError.

    `offset`: where in the file, in bytes; None: at the current position.
    """
    while len(data):
        done = os.write(file, data) if offset is None else os.pwrite(file, data, offset)
        data = data[done:]
        offset = None if offset is None else offset + done


def remove(folder: Path) -> None:
    """Remove an image, complete or not, if it exists."""
    # The index is removed first, so that an interrupted removal leaves no valid image.
    with suppress(FileNotFoundError):
        (folder / INDEX).unlink()
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class FrozenImage:
    """A complete image, for reading."""

    folder: Path
    head: Head
    files: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path) -> "FrozenImage":
        """Open the image in a directory. Raises CaptureFailed if the image is invalid."""
        try:
            index = json.loads((folder / INDEX).read_text())
            head, _ = parse_head((folder / HEAD).read_bytes() + b"\0")
            told = [(block["name"], block["size"]) for block in index["blocks"]]
            files = tuple(str(block["file"]) for block in index["blocks"])
            sizes = [(folder / name).stat().st_size for name in files]
        except (OSError, ValueError, TypeError, LookupError) as exc:
            raise CaptureFailed(
                f"{folder} is not a complete image: {exc}", hint="try again"
            ) from exc
        known = [(block.name, block.size) for block in head.blocks]
        if told != known or sizes != [size for _, size in known]:
            raise CaptureFailed(
                f"{folder}: the memory files do not match the stream's header",
                hint="try again",
            )
        return cls(folder, head, files)

    @property
    def blocks(self) -> tuple[RamBlock, ...]:
        return self.head.blocks

    @property
    def head_bytes(self) -> bytes:
        return (self.folder / HEAD).read_bytes()

    def tail(self) -> bytes:
        return (self.folder / TAIL).read_bytes()

    def file(self, block: int) -> Path:
        return self.folder / self.files[block]

    def present(self, block: int) -> NDArray[np.bool_]:
        """Return, for each page of a block, whether it may have data; all other pages are zeros.

        Raises CaptureFailed if the image is damaged, and OSError.
        """
        count = self.blocks[block].size // PAGE
        bits = np.fromfile(self.folder / f"{self.files[block]}.present", dtype=np.uint8)
        if len(bits) != (count + 7) // 8:
            raise CaptureFailed(
                f"{self.folder}: invalid page map of {len(bits)} bytes for {count} pages"
            )
        return np.unpackbits(bits, count=count).view(np.bool_)

    def remove(self) -> None:
        remove(self.folder)
