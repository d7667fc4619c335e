"""The last copy of a guest's shared memory: files beside it, and which epoch they hold.

It is at the same time the frozen image of that epoch. While it is brought up to a newer one it
holds none; whoever finds it so can still use it, but not tell what has changed since.
"""

import json
import os
from collections.abc import Mapping as Table
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from vmckpt.checkpoint import image
from vmckpt.checkpoint.compare import Flags, Mapping
from vmckpt.checkpoint.guestmemory import MemoryFile
from vmckpt.checkpoint.head import PAGE, Head
from vmckpt.checkpoint.image import FrozenImage
from vmckpt.checkpoint.stream import Addresses, Pages
from vmckpt.errors import CaptureFailed

_STATE = "last.json"
# A guest's memory apart from that of its files: firmware, graphics cards.
_MOST_PRIVATE = 256 << 20


class LastCopy:
    """Open it with `with LastCopy(...)`; one process at a time."""

    def __init__(self, folder: Path, files: Sequence[MemoryFile], identity: str) -> None:
        """`identity` is that of the QEMU process; the copy of another one is removed."""
        self.folder = folder
        self._identity = identity
        self._files = files
        self.epoch = self._epoch()
        """That it holds; None: none, or a part of one."""
        if self.epoch is None and not self._ours():
            image.remove(folder)
            folder.mkdir(mode=0o700, parents=True)
        self.mappings: list[Mapping] = []
        try:
            for index, file in enumerate(files):
                opened = os.open(folder / _name(index), os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    os.ftruncate(opened, file.size)
                    self.mappings.append(Mapping(opened, file.size, write=True))
                finally:
                    os.close(opened)
        except BaseException:
            self.close()
            raise
        if self.epoch is None:
            self._write(None)

    def __enter__(self) -> "LastCopy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for mapping in self.mappings:
            mapping.close()
        self.mappings = []

    def tear(self) -> None:
        """It is about to change: from now on it holds no epoch."""
        self.epoch = None
        self._write(None)

    def complete(self, epoch: int, stream: "PrivateMemory") -> tuple[FrozenImage, dict[str, Flags]]:
        """It holds this epoch now; the image, and what changed in memory that is in no file."""
        head = stream.taken()
        (self.folder / image.HEAD).write_bytes(head.written(without_shared=head.without_shared))
        (self.folder / image.TAIL).write_bytes(stream.tail_bytes)
        names: list[str] = []
        present: list[Flags] = []
        changed: dict[str, Flags] = {}
        for index, block in enumerate(head.blocks):
            shared = stream.shared.get(index)
            if shared is not None:
                names.append(_name(shared))
                present.append(self.mappings[shared].held())
                continue
            names.append(f"private-{index}")
            data = stream.private[index]
            present.append(np.asarray(data.any(axis=1)))
            changed[block.name] = _replace(self.folder / names[-1], data)
        made = image.complete(self.folder, head, names, present)
        self.epoch = epoch
        self._write(epoch)
        return made, changed

    def _state(self) -> dict[str, object]:
        try:
            told = json.loads((self.folder / _STATE).read_text())
        except (OSError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}

    def _ours(self) -> bool:
        sizes = [file.size for file in self._files]
        state = self._state()
        return state.get("of") == self._identity and state.get("sizes") == sizes

    def _epoch(self) -> int | None:
        told = self._state().get("epoch")
        return told if isinstance(told, int) and self._ours() else None

    def _write(self, epoch: int | None) -> None:
        if epoch is None:
            with suppress(FileNotFoundError):
                (self.folder / image.INDEX).unlink()
        sizes = [file.size for file in self._files]
        partial = self.folder / f"{_STATE}.new"
        partial.write_text(json.dumps({"of": self._identity, "sizes": sizes, "epoch": epoch}))
        partial.rename(self.folder / _STATE)


def _name(index: int) -> str:
    return f"shared-{index}"


def _replace(path: Path, data: Pages) -> Flags:
    """Write a block as a file; which of its pages differ from those that were there."""
    flat = data.reshape(-1)
    try:
        old = np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        old = np.zeros(0, dtype=np.uint8)
    known = len(old) == len(flat)
    changed: Flags = (
        (old.reshape(-1, PAGE) != data).any(axis=1) if known else np.ones(len(data), dtype=np.bool_)
    )
    if changed.any():
        flat.tofile(path)
    return changed


class PrivateMemory:
    """A sink (`stream.Sink`) for a stream without shared memory: the little that is left."""

    def __init__(self, files: Sequence[MemoryFile]) -> None:
        self._files = files
        self._head: Head | None = None
        self.shared: dict[int, int] = {}
        """The number of the file for each block that is one."""
        self.private: dict[int, Pages] = {}
        self.tail_bytes = bytearray()

    def begin(self, head: Head) -> None:
        """Raises CaptureFailed if the blocks are not those of the files."""
        self._head = head
        by_name: Table[str, int] = {
            name: index for index, file in enumerate(self._files) for name in file.names
        }
        for index, block in enumerate(head.blocks):
            number = by_name.get(block.name)
            if number is None:
                self.private[index] = np.zeros((block.size // PAGE, PAGE), dtype=np.uint8)
            elif self._files[number].size == block.size:
                self.shared[index] = number
        if len(self.shared) != len(self._files) or not head.without_shared:
            raise CaptureFailed(
                "the stream's list of memory is not that of the guest's files",
                mend="use another way of capture",
            )
        if sum(len(data) for data in self.private.values()) * PAGE > _MOST_PRIVATE:
            raise CaptureFailed("too much of its memory is in no file", mend="use another way")

    def pages(self, block: int, addresses: Addresses, data: Pages) -> None:
        """Raises CaptureFailed if QEMU sends what it should have left out."""
        self._private(block)[addresses // PAGE] = data

    def zeros(self, block: int, addresses: Addresses) -> None:
        self._private(block)[addresses // PAGE] = 0

    def tail(self, data: memoryview) -> None:
        self.tail_bytes += data

    def taken(self) -> Head:
        if self._head is None:
            raise CaptureFailed("a stream without a head", mend="capture the guest again")
        return self._head

    def _private(self, block: int) -> Pages:
        if block not in self.private:
            raise CaptureFailed(
                "QEMU sent memory that it shares with us", mend="use another way of capture"
            )
        return self.private[block]
