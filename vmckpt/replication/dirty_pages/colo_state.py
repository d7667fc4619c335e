"""Turn a checkpoint of QEMU's COLO stream into changed pages and a device state.

The device state has the format that a waiting standby loads, as in an ordinary migration without
shared memory.
"""

import json
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Flags, Mapping, Numbers
from vmckpt.capture.qemu_stream import devices
from vmckpt.capture.qemu_stream.header import DESCRIPTION, PAGE, Head
from vmckpt.capture.qemu_stream.stream import Addresses, StreamWriter, starts_as_zeros
from vmckpt.capture.qemu_stream.stream import Pages as Bytes4096
from vmckpt.errors import CannotCapture
from vmckpt.replication.dirty_pages.finder import Changed, Pages

_SHIFT = PAGE.bit_length() - 1
_NONE: Numbers = np.zeros(0, dtype=np.intp)
# The run state of the guest after loading, which QEMU records only once, before COLO begins.
_NOTED = b"\x0bglobalstate" + struct.pack(">II", 0, 1)
_RUNNING = struct.pack(">I", 8) + b"running\0"
_PAUSED = struct.pack(">I", 7) + b"paused\0\0"


class Gathered:
    """A sink for a stream's pages: pages of memory files go to `changed`, others to `private`."""

    def __init__(self, files: Sequence[MemoryFile], last: Sequence[Mapping], *, most: int) -> None:
        """`most`: maximum number of an epoch's pages to keep aside. Further pages are written to
        the last copy."""
        self._files, self._last, self._most = files, last, most
        self._first = True
        self._place: dict[int, int] = {}
        self.private: dict[str, NDArray[np.uint8]] = {}
        """Blocks that are not in a memory file, each of shape (pages, 4096)."""
        self.version = 0
        """Increases when a private block changes."""
        self._names: list[str] = []
        self._numbers: list[list[Numbers]] = [[] for _ in files]
        self._pages: list[list[Pages]] = [[] for _ in files]
        self._whole: list[Flags] = [np.zeros(len(one.pages), dtype=np.bool_) for one in last]
        self._previous: list[Changed] = []
        self._room = most

    def begin(self, head: Head) -> None:
        """Assign the stream's blocks to the memory files.

        Raises CannotCapture if the blocks do not match the memory files.
        """
        self._names = [block.name for block in head.blocks]
        for index, block in enumerate(head.blocks):
            found = [n for n, one in enumerate(self._files) if block.name in one.names]
            if found and self._files[found[0]].size == block.size:
                self._place[index] = found[0]
            else:
                self.private[block.name] = np.zeros((block.size >> _SHIFT, PAGE), dtype=np.uint8)
        if sorted(self._place.values()) != list(range(len(self._files))):
            raise CannotCapture(
                f"QEMU's blocks {', '.join(self._names)} do not match the guest's memory files"
            )

    def pages(self, block: int, addresses: Addresses, data: Bytes4096) -> None:
        numbers = (addresses >> np.uint64(_SHIFT)).astype(np.intp)
        file = self._place.get(block)
        if file is None:
            self.private[self._names[block]][numbers] = data
            self.version += 1
        else:
            self._keep(file, numbers, np.ascontiguousarray(data).view(np.uint64))

    def zeros(self, block: int, addresses: Addresses) -> None:
        numbers = (addresses >> np.uint64(_SHIFT)).astype(np.intp)
        file = self._place.get(block)
        if file is None:
            self.private[self._names[block]][numbers] = 0
            self.version += 1
        elif not self._first:
            self._keep(file, numbers, np.zeros((len(numbers), PAGE // 8), dtype=np.uint64))
        else:
            # A page that was never written to the copy is already zero in it; writing it would
            # allocate memory.
            numbers = numbers[self._last[file].written[numbers]]
            self._keep(file, numbers, np.zeros((len(numbers), PAGE // 8), dtype=np.uint64))

    def tail(self, data: memoryview) -> None:
        raise AssertionError(f"the parser must keep {len(data)} bytes of device state")

    def _keep(self, file: int, numbers: Numbers, pages: Pages) -> None:
        last = self._last[file]
        if self._first:
            differ = (last.pages[numbers] != pages).any(axis=1)
            numbers, pages = numbers[differ], pages[differ]
        elif self._room >= len(numbers):
            self._room -= len(numbers)
            self._numbers[file].append(numbers)
            # The parser's data is in a buffer that the next block overwrites.
            self._pages[file].append(pages.copy())
            return
        last.pages[numbers] = pages
        last.written[numbers] = True
        self._whole[file][numbers] = True

    def changed(self) -> list[Changed]:
        """Return the changes in each file since the last call.

        Pages that the previous call returned, and that have not been written to the last copies
        since, are returned again, because QEMU sends each change only once.
        """
        self._again()
        found = []
        for file, whole in enumerate(self._whole):
            numbers, pages = _newest(self._numbers[file], self._pages[file])
            placed = np.flatnonzero(whole)
            if len(placed):
                # If a page was received twice, the content in the last copy is newer.
                still = ~whole[numbers]
                numbers, pages = numbers[still], pages[still]
            found.append(Changed(numbers=numbers, pages=pages, whole=placed))
            self._numbers[file], self._pages[file] = [], []
            whole[:] = False
        self._room, self._first, self._previous = self._most, False, found
        return found

    def _again(self) -> None:
        for file, one in enumerate(self._previous):
            missing = (self._last[file].pages[one.numbers] != one.pages).any(axis=1)
            self._numbers[file].insert(0, one.numbers[missing])
            self._pages[file].insert(0, one.pages[missing])


def _newest(numbers: list[Numbers], pages: list[Pages]) -> tuple[Numbers, Pages]:
    """Return all pages sorted by number, each with its latest content."""
    if not numbers:
        return _NONE, np.zeros((0, PAGE // 8), dtype=np.uint64)
    every = np.concatenate(numbers)
    found, where = np.unique(every[::-1], return_index=True)
    return found, np.concatenate(pages)[len(every) - 1 - where]


class StateForm:
    """Writes a checkpoint's device state in the format that a waiting standby loads.

    The standby has the capability `x-ignore-shared`.
    """

    def __init__(self, head: Head, gathered: Gathered, first: bytes) -> None:
        """`head`: the header of a stream without shared memory, which lists the stream's blocks;
        `first`: the device state of the first pass, which ends with QEMU's VM description.
        """
        told = devices.description(first)
        text = json.dumps(told or {}).encode()
        self._described = struct.pack(">BI", DESCRIPTION, len(text)) + text
        self._head, self._gathered = head, gathered
        self._version = -1
        self._memory = b""

    def written(self, state: bytes) -> bytes:
        """Return the state to load. `state`: a checkpoint's sections up to EOF."""
        gathered = self._gathered
        if self._version != gathered.version:
            out: list[bytes] = []
            writer = StreamWriter(self._head, lambda data: out.append(bytes(data)))
            writer.opening(without_shared=True)
            for name, pages in gathered.private.items():
                self._block(writer, name, pages)
            self._memory, self._version = b"".join(out), gathered.version
        return self._memory + paused(state) + self._described

    @staticmethod
    def _block(writer: StreamWriter, name: str, pages: NDArray[np.uint8]) -> None:
        full = pages.any(axis=1)
        for flags, write in ((full, True), (~full, False)):
            numbers = np.flatnonzero(flags)
            addresses = numbers.astype(np.uint64) << np.uint64(_SHIFT)
            if write:
                writer.pages(name, addresses, pages[numbers])
            elif not starts_as_zeros(name):
                writer.zeros(name, addresses)


def paused(state: bytes) -> bytes:
    """Return the device state with the run state "running", if present, replaced by "paused".

    A guest that loads this state waits for `cont`.
    """
    if state.count(_NOTED + _RUNNING) != 1:
        return state
    return state.replace(_NOTED + _RUNNING, _NOTED + _PAUSED)


def without_description(first: bytes) -> bytes:
    """Return the device state of a first pass up to its EOF."""
    at = len(first)
    while (at := first.rfind(bytes([0, DESCRIPTION]), 0, at)) >= 0:
        if int.from_bytes(first[at + 2 : at + 6], "big") == len(first) - at - 6:
            return first[: at + 1]
    return first
