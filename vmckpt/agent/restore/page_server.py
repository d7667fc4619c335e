"""Serve a running guest's memory from a snapshot, and fill in the rest.

An access to a missing page waits until the page is here. The server reads whole groups of pages,
since the guest will soon need the neighbours of a page. It also remembers which groups the guest
needed first. The next restore of the snapshot on this host fills these groups first (REAP: D.
Ustiugov et al., *Benchmarking, Analysis, and Optimization of Serverless Function Snapshots*, ASPLOS
2021).
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from vmckpt.capture.memory.missing_pages import MemoryGone, MissingPages
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import StoreError
from vmckpt.hypervisor.qemu_process import userfaultfd
from vmckpt.hypervisor.qemu_process.injection import CannotInject
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.store.assemble import Assembly
from vmckpt.store.format.chunk_map import GROUP, Kind
from vmckpt.units import Bytes, Seconds
from vmckpt.util import atomic_file

_GROUP = GROUP[Kind.RAM] * PAGE
_FIRST = Seconds(3.0)
"""How long the groups that the guest accesses are recorded."""
_MOST_FIRST = 4096
"""Maximum number of groups in a record: 1 GiB of memory."""
_RECORDS = 64
"""Number of snapshots whose records a host keeps."""
_TURN = 0.2
_AGAIN = Seconds(0.5)
"""Time between two attempts to read a page that the store did not return."""

Group = tuple[int, int]
"""Index of a block, and number of a group in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedMemory:
    """Memory of a QEMU process that is registered for serving."""

    pid: int
    number: int
    """The userfaultfd in the process."""
    blocks: Mapping[str, tuple[int, int]]
    """Address and size of each block, by its name in QEMU's stream."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ServedMemory":
        """Parse the JSON. Raises KeyError, TypeError, ValueError."""
        blocks = {str(name): (int(at), int(size)) for name, (at, size) in told["blocks"].items()}
        return cls(pid=int(told["pid"]), number=int(told["number"]), blocks=blocks)

    @property
    def ranges(self) -> tuple[MemoryRange, ...]:
        return tuple(MemoryRange(*one) for one in self.blocks.values())


def fill_order(sizes: Sequence[int], first: Sequence[Group]) -> Iterator[Group]:
    """Yield all groups once: those in `first`, then the others in the order of addresses. Pure.

    `sizes`: size of each block in bytes. Groups in `first` that do not exist are ignored.
    """
    counts = [-(-size // _GROUP) for size in sizes]
    early = dict.fromkeys(
        (block, group) for block, group in first
        if 0 <= block < len(counts) and 0 <= group < counts[block]
    )  # fmt: skip
    yield from early
    for block, count in enumerate(counts):
        for group in range(count):
            if (block, group) not in early:
                yield block, group


class FirstPages:
    """The record of the groups that a guest needed first after a restore, kept on the host."""

    def __init__(self, state: Path, snapshot: str) -> None:
        self._path = state / "cache" / "first-pages" / f"{snapshot}.json"

    def read(self) -> list[Group]:
        """Return the groups in the order of their accesses; empty if there is no record."""
        try:
            told = json.loads(self._path.read_text())
            return [(int(block), int(group)) for block, group in told[:_MOST_FIRST]]
        except (OSError, ValueError, TypeError):
            return []

    def write(self, groups: Sequence[Group]) -> None:
        """Store the groups. Removes the oldest records. Raises OSError."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_file.put(self._path, json.dumps(groups[:_MOST_FIRST]), private=True)
        known = sorted(self._path.parent.iterdir(), key=lambda one: one.stat().st_mtime)
        for old in known[:-_RECORDS]:
            old.unlink(missing_ok=True)


class PageServer:
    """Serves the missing pages of a QEMU process. Use as `with PageServer(…) as server`.

    Inside the block, a thread answers faults. After the block, accesses wait for another server,
    unless `fill` has completed the memory.
    """

    def __init__(
        self, process: HeldProcess, memory: ServedMemory, blocks: Mapping[str, Assembly],
        record: FirstPages,
    ) -> None:  # fmt: skip
        """`blocks`: the content of each block, by name. Raises OSError."""
        self._process, self._memory, self._record = process, memory, record
        self._blocks = [blocks[name] for name in memory.blocks]
        self._ranges = memory.ranges
        self._pages = MissingPages(process, memory.number, self._ranges)
        self._first = record.read()
        self._accessed: dict[Group, None] = {}
        self._filled: set[Group] = set()
        self._urgent = threading.Event()
        self._stop, self._gone = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._answer, name="pages", daemon=True)
        self.trouble: StoreError | None = None
        """Why the guest waits for a page that the store does not return; None: it does not wait."""

    def __enter__(self) -> Self:
        self._pages.__enter__()
        with suppress(MemoryGone):
            self._pages.retry()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._pages.__exit__()

    @property
    def total(self) -> Bytes:
        return Bytes(sum(one.size for one in self._ranges))

    def fill(self, rate: float | None = None) -> Iterator[Bytes]:
        """Fill all missing pages, and end the registration. Yields the bytes done so far.

        `rate`: maximum bytes per second. If the store fails, waits until it answers again, and
        yields meanwhile. Ends early if QEMU has ended.
        """
        began, done = time.monotonic(), 0
        with suppress(MemoryGone):
            for group in fill_order([one.size for one in self._ranges], self._first):
                while not self._fill_group(group):
                    yield Bytes(done)
                    self._gone.wait(_AGAIN)
                done += _GROUP
                yield Bytes(min(done, self.total))
                if rate is not None:
                    self._gone.wait(max(0.0, done / rate - (time.monotonic() - began)))
                if self._gone.is_set():
                    return
            self._end()

    def _fill_group(self, group: Group) -> bool:
        """Fill a group. Returns whether the store returned it. Raises MemoryGone."""
        while self._urgent.is_set():
            time.sleep(0.0005)  # the guest waits for other pages
        if group in self._filled:
            return True
        try:
            self._bring(group)
        except StoreError as exc:
            self.trouble = exc
            return False
        self.trouble = None
        return True

    def _end(self) -> None:
        """End the registration: all pages that are still missing are zeros. Raises MemoryGone."""
        self._pages.unregister()
        # A userfaultfd without ranges has no effect, so QEMU may keep it.
        with suppress(CannotInject, OSError):
            userfaultfd.close_inside(self._process, self._memory.number)
        with suppress(OSError):
            self._record.write(list(self._accessed))

    def _answer(self) -> None:
        """Answer faults until the block ends."""
        began = time.monotonic()
        waiting: list[int] = []
        tried = began
        try:
            while not self._stop.is_set():
                found = self._pages.faults(_TURN)
                if waiting and time.monotonic() - tried >= _AGAIN:
                    found, waiting, tried = waiting + found, [], time.monotonic()
                if not found:
                    continue
                self._urgent.set()
                for address in found:
                    record = time.monotonic() - began < _FIRST
                    if not self._serve(address, record=record):
                        waiting.append(address)
                self._urgent.clear()
        except (MemoryGone, OSError):
            self._gone.set()
        finally:
            self._urgent.clear()

    def _serve(self, address: int, *, record: bool) -> bool:
        """Bring the page at an address. Returns whether the store returned it."""
        block = next(
            index for index, one in enumerate(self._ranges)
            if one.start <= address < one.start + one.size
        )  # fmt: skip
        offset = address - self._ranges[block].start
        group = block, offset // _GROUP
        if record:
            self._accessed[group] = None
        try:
            self._bring(group, offset)
        except StoreError as exc:
            self.trouble = exc
            return False
        return True

    def _bring(self, group: Group, needed: int | None = None) -> None:
        """Copy a group's pages. `needed`: offset of a page that must exist afterwards, even if it
        is zeros, or was filled before and removed by the guest. Raises StoreError, MemoryGone."""
        block, number = group
        memory, content = self._ranges[block], self._blocks[block]
        first = number * _GROUP
        length = min(_GROUP, memory.size - first)
        at = first
        for size, zeros in content.zeros(first, length):
            if not zeros:
                data = np.frombuffer(content.read_bytes(at, size), dtype=np.uint8)
                self._pages.copy(memory.start + at, int(data.ctypes.data), size)
            elif needed is not None and at <= needed < at + size:
                self._pages.fill_zeros(memory.start + needed, PAGE)
            at += size
        self._filled.add(group)
