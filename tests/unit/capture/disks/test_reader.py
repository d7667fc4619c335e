"""Units of a disk: what is said of them, and their bytes in whatever order they are asked for."""

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.capture.disks.reader import UNIT, DiskReader, Run, State
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Extent, Piece

CHANGED = "qemu:dirty-bitmap:changed"
HOLE = wire.HOLE | wire.ZERO


class Disk:
    """A disk in memory that tells of itself as QEMU would."""

    def __init__(self, data: bytes, allocation: list[Extent], changed: list[Extent]) -> None:
        self.data, self.size = data, len(data)
        self.said = {wire.ALLOCATION: allocation, CHANGED: changed}
        self.asked: list[tuple[int, int]] = []
        self.closed = False

    def extents(self, context: str, offset: int = 0, length: int | None = None) -> Iterator[Extent]:
        end = self.size if length is None else offset + length
        for one in self.said[context]:
            begin, stop = max(one.offset, offset), min(one.end, end)
            if begin < stop:
                yield Extent(begin, stop - begin, one.flags)

    def read_many(self, pieces: Iterable[tuple[int, int]]) -> Iterator[Piece]:
        for offset, length in pieces:
            self.asked.append((offset, length))
            data = self.data[offset : offset + length]
            yield Piece(offset, length, memoryview(data) if any(data) else None)

    def close(self) -> None:
        self.closed = True


def units(*counts: tuple[int, int], size: int | None = None) -> list[Extent]:
    """Extents of (units, flags) one after the other."""
    at, found = 0, []
    for count, flags in counts:
        length = count * UNIT if size is None else min(count * UNIT, size - at)
        found.append(Extent(at, length, flags))
        at += length
    return found


def test_a_whole_read_goes_by_the_allocation() -> None:
    size = 40 * UNIT + 100
    data = bytes(2 * UNIT) + b"\1" * (30 * UNIT) + bytes(8 * UNIT) + b"\2" * 100
    disk = Disk(data, units((2, HOLE), (30, 0), (8, HOLE), (1, 0), size=size), [])
    with DiskReader("vda", disk, disk, changed=None) as reader:
        assert (reader.size, reader.incremental) == (size, False)
        assert list(reader.runs()) == [
            Run(0, 2, State.ZEROS), Run(2, 30, State.DATA), Run(32, 8, State.ZEROS),
            Run(40, 1, State.DATA),
        ]  # fmt: skip
        assert bytes(reader.read(2, 30)) == b"\1" * 30 * UNIT
        assert bytes(reader.read(40, 1)) == b"\2" * 100 + bytes(UNIT - 100)
        # No piece crosses a line of the grid, and nothing was asked for twice.
        assert [(at // UNIT, n // UNIT) for at, n in disk.asked[:2]] == [(2, 14), (16, 16)]
        assert len(disk.asked) == 3

    assert disk.closed


def test_an_incremental_read_goes_by_the_bitmap() -> None:
    data = b"\1" * (100 * UNIT)
    disk = Disk(
        data,
        units((20, 0), (40, HOLE), (40, 0)),
        units((1, wire.DIRTY), (29, 0), (40, wire.DIRTY), (30, 0)),
    )
    reader = DiskReader("vda", disk, disk, changed=CHANGED)

    assert reader.incremental
    assert list(reader.runs()) == [
        Run(0, 1, State.DATA), Run(1, 29, State.SAME), Run(30, 30, State.ZEROS),
        Run(60, 10, State.DATA), Run(70, 30, State.SAME),
    ]  # fmt: skip


def test_parts_of_units_count_as_data() -> None:
    size = 3 * UNIT + 512
    said = [Extent(0, UNIT + 1, HOLE), Extent(UNIT + 1, 512, 0), Extent(UNIT + 513, size, HOLE)]
    disk = Disk(bytes(size), said, [Extent(0, 5, 0), Extent(5, 1, 1), Extent(6, size - 6, 0)])
    plain = DiskReader("vda", disk, disk, changed=None)
    changed = DiskReader("vda", disk, disk, changed=CHANGED)

    assert [r.state for r in plain.runs()] == [State.ZEROS, State.DATA, State.ZEROS]
    assert list(changed.runs()) == [Run(0, 1, State.DATA), Run(1, 3, State.SAME)]


def test_an_empty_disk_has_no_units() -> None:
    disk = Disk(b"", [], [])

    assert list(DiskReader("vda", disk, disk, changed=None).runs()) == []


SIZE = 70 * UNIT + 4096
CONTENT = b"".join(
    bytes(UNIT) if n % 7 == 3 else random.Random(n).randbytes(UNIT) for n in range(71)
)[:SIZE]


@given(
    changed=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0, 1])), max_size=9),
    asked=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 71)), max_size=12),
    incremental=st.booleans(),
)
def test_whatever_is_read_in_whatever_order_is_what_the_disk_holds(
    changed: list[tuple[int, int]], asked: list[tuple[int, int]], incremental: bool
) -> None:
    said = units(*changed, (71, 0), size=SIZE)
    said = [one for one in said if one.length > 0]
    ahead = Disk(CONTENT, [Extent(e.offset, e.length, 0) for e in said], said)
    aside = Disk(CONTENT, [], [])
    reader = DiskReader("vda", ahead, aside, changed=CHANGED if incremental else None)

    for start, count in asked:
        part = bytes(reader.read(start, min(count, 71 - start)))
        expected = CONTENT[start * UNIT : (start + min(count, 71 - start)) * UNIT]
        assert part == expected.ljust(len(part), b"\0")


@pytest.mark.parametrize("step", [1, 3, 16, 40, 71])
def test_reading_in_order_asks_for_each_byte_once(step: int) -> None:
    ahead, aside = Disk(CONTENT, units((71, 0), size=SIZE), []), Disk(CONTENT, [], [])
    reader = DiskReader("vda", ahead, aside, changed=None)
    found = b"".join(bytes(reader.read(n, min(step, 71 - n))) for n in range(0, 71, step))

    assert found[:SIZE] == CONTENT
    if step % 16 == 0 or step == 71:
        assert aside.asked == []
