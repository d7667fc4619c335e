"""Read one disk of a running backup: the state and the bytes of each unit."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, Extent, Piece
from vmckpt.errors import HypervisorError
from vmckpt.model.disk import OpenBackup, OpenDisk
from vmckpt.units import Bytes

UNIT = 65536
_GROUP = 16
"""Units per cell of the prefetch grid; no prefetched piece crosses a cell boundary."""
_LONG = 16
"""Minimum length of a run of changed units for which a query for zeros pays off."""


class State(IntEnum):
    """The state of a unit, as known before the unit is read."""

    ZEROS = 0
    DATA = 1
    SAME = 2
    """Unchanged since the checkpoint."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive units of one state."""

    start: int
    count: int
    state: State


class Source(Protocol):
    """The part of `capture.nbd.client.Client` that is used here."""

    @property
    def size(self) -> int: ...
    def extents(
        self, context: str, offset: int = 0, length: int | None = None
    ) -> Iterator[Extent]: ...
    def read_many(self, pieces: Iterable[tuple[int, int]]) -> Iterator[Piece]: ...
    def close(self) -> None: ...


class DiskReader:
    """One disk of a running backup, in units of 64 KiB; the last unit is padded with zeros.

    Use as `with opened(...) as disk`.
    """

    def __init__(self, name: str, ahead: Source, aside: Source, *, changed: str | None) -> None:
        """`ahead`, `aside`: connections to the disk, for reading ahead and for other reads.

        `changed`: the NBD metadata context that reports changed blocks; None: read all data.
        """
        self._connections = (ahead, aside)
        self.name = name
        self.size = Bytes(ahead.size)
        self.incremental = changed is not None
        self._aside = aside
        self._states = _states(ahead, changed)
        self._coming = ahead.read_many(self._wanted())
        self._next: Piece | None = next(self._coming, None)
        self._buffer = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    def runs(self) -> Iterator[Run]:
        """Yield runs of all units, in order."""
        yield from _runs(self._states)

    def read(self, start: int, count: int) -> memoryview:
        """Return the bytes of `count` units from unit `start` on, whatever their state.

        The result is valid until the next call. If units are read in order, units with data are
        prefetched. Raises HypervisorError.
        """
        if len(self._buffer) < count * UNIT:
            self._buffer = bytearray(count * UNIT)
        room = memoryview(self._buffer)[: count * UNIT]
        at, end = start * UNIT, min((start + count) * UNIT, self.size)
        while at < end:
            at = self._put(room, start * UNIT, at, end)
        room[end - start * UNIT :] = bytes(len(room) - (end - start * UNIT))
        return room

    def _put(self, room: memoryview, origin: int, at: int, end: int) -> int:
        """Read bytes from offset `at`, up to `end` at most, into `room`.

        Returns the offset reached. `origin`: the offset in the disk at which `room` starts.
        """
        if self._states[at // UNIT] == State.DATA:
            while self._next is not None and self._next.offset < at:
                self._next = next(self._coming, None)
        piece = self._next
        if piece is not None and piece.offset == at and at + piece.length <= end:
            self._next = next(self._coming, None)
            _copy(piece, room, origin)
            return at + piece.length
        # The range was not prefetched, or is only a part of the next prefetched piece.
        stop = min(end, (at // UNIT + 1) * UNIT)
        if piece is None or piece.offset > at:
            stop = end if piece is None else min(end, piece.offset)
        for one in self._aside.read_many([(at, stop - at)]):
            _copy(one, room, origin)
        return stop

    def _wanted(self) -> Iterator[tuple[int, int]]:
        """Yield offset and length of all data, in pieces that do not cross a cell boundary."""
        for run in _runs(self._states):
            if run.state is State.DATA:
                at, end = run.start * UNIT, min((run.start + run.count) * UNIT, self.size)
                while at < end:
                    line = (at // (_GROUP * UNIT) + 1) * _GROUP * UNIT
                    yield at, min(line, end) - at
                    at = min(line, end)


def _copy(piece: Piece, room: memoryview, origin: int) -> None:
    begin = piece.offset - origin
    room[begin : begin + piece.length] = piece.content()


def _states(disk: Source, changed: str | None) -> NDArray[np.uint8]:
    states = np.zeros(-(-disk.size // UNIT), dtype=np.uint8)
    if changed is None:
        for extent in disk.extents(wire.ALLOCATION):
            if not extent.flags & wire.ZERO:
                _set(states, extent, State.DATA)
        return states
    states[:] = State.SAME
    for extent in disk.extents(changed):
        if extent.flags & wire.DIRTY:
            _set(states, extent, State.DATA)
    for run in list(_runs(states)):
        if run.state is State.DATA and run.count >= _LONG:
            _set_zeros(states, disk, run)
    return states


def _set(states: NDArray[np.uint8], extent: Extent, state: State) -> None:
    """Set the state of every unit that an extent touches."""
    states[extent.offset // UNIT : -(-extent.end // UNIT)] = state


def _set_zeros(states: NDArray[np.uint8], disk: Source, run: Run) -> None:
    """Mark the units of a changed run that are now completely zero."""
    begin, end = run.start * UNIT, min((run.start + run.count) * UNIT, disk.size)
    for extent in disk.extents(wire.ALLOCATION, begin, end - begin):
        if extent.flags & wire.ZERO:
            last = extent.end // UNIT if extent.end < disk.size else len(states)
            states[-(-extent.offset // UNIT) : last] = State.ZEROS


def _runs(states: NDArray[np.uint8]) -> Iterator[Run]:
    edges = np.flatnonzero(np.diff(states)) + 1
    bounds = [0, *edges.tolist(), len(states)]
    for start, end in itertools.pairwise(bounds):
        if start < end:
            yield Run(start, end - start, State(int(states[start])))


def opened(backup: OpenBackup, disk: OpenDisk, host: str) -> DiskReader:
    """Open a disk of a running backup for reading. Raises HypervisorError."""
    contexts = [wire.ALLOCATION] + ([disk.changed] if disk.changed is not None else [])
    place = wire.Unix(backup.socket)
    with ExitStack() as stack:
        ahead, aside = (
            stack.enter_context(Client(place, disk.name, host=host, contexts=wanted))
            for wanted in (contexts, [])
        )
        for context in contexts:
            if context not in ahead.contexts:
                text = f"{host}: disk {disk.name}: QEMU's NBD export has no context {context}"
                raise HypervisorError(text, host=host)
        reader = DiskReader(disk.name, ahead, aside, changed=disk.changed)
        stack.pop_all()
    return reader
