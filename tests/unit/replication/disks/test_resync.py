"""A standby's disk brought up by differences, while a guest writes at any moment of it."""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pytest

from tests.support.staging import Disk
from vmckpt.capture.nbd.client import Piece
from vmckpt.replication.backup import redo_log
from vmckpt.replication.disks import resync, write_log
from vmckpt.replication.disks.resync import Progress, answer, bring
from vmckpt.replication.protocol.messages import Digests, PageRequest
from vmckpt.units import Bytes

PIECE = 16


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIECE", PIECE), ("_ASKED", 4), ("_READ", 32), ("_BATCH", 40)):
        monkeypatch.setattr(resync, name, value)


class Sides:
    """The guest's disk with its log, and the standby's; `moment` happens wherever others could."""

    def __init__(self, ours: bytes, theirs: bytes) -> None:
        self.ours, self.theirs = Disk(bytearray(ours)), Disk(bytearray(theirs))
        self.log: list[bytes] = []
        self.late: list[tuple[int, bytes]] = []
        """Writes that are in the guest's disk, and not in the log yet: QEMU does both at once."""
        self.moment: Callable[[], None] = lambda: None
        self.asked: list[PageRequest] = []
        self.sent: list[write_log.Record] = []
        self.change: Callable[[Digests], Digests] = lambda told: told

    # --- the guest

    def write(self, offset: int, data: bytes, *, late: bool = False) -> None:
        if any(at < offset + len(data) and offset < at + len(other) for at, other in self.late):
            self.settle()  # of two that overlap the second waits for the first
        self.ours.content[offset : offset + len(data)] = data
        self.late.append((offset, data))
        if not late:
            self.settle()

    def settle(self) -> None:
        self.log += [write_log.header(at, len(data)) + data for at, data in self.late]
        self.late.clear()

    def drain(self) -> None:
        for record in self.log:
            redo_log.write_records(record, self.theirs)
        self.log.clear()

    # --- the line, and what is read and sent

    def send(self, message: PageRequest) -> None:
        self.asked.append(message)
        self.moment()

    def expect(self, kind: type[Digests], limit: float) -> Digests:
        del kind, limit
        self.moment()
        return self.change(answer(self.asked[-1], [self.theirs]))

    @property
    def size(self) -> int:
        return self.ours.size

    def read_many(self, pieces: Iterable[tuple[int, int]], /) -> Iterator[Piece]:
        for piece in self.ours.read_many(pieces):
            self.moment()
            yield piece

    def bulk(self, disk: int, records: bytes) -> None:
        assert disk == 0
        self.moment()
        redo_log.write_records(records, self.theirs)
        self.sent += write_log.records(records)
        self.moment()

    def bring(self) -> list[Progress]:
        found = []
        for progress in bring(cast("Any", self), cast("Any", self), [self]):
            found.append(progress)
            self.drain()
        return found


def filled(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_disks_that_are_the_same_cost_digests_and_nothing_else() -> None:
    both = Sides(filled(200, 1), filled(200, 1))
    told = both.bring()
    assert both.sent == []
    assert [(one.file, one.first, one.count) for one in both.asked] == [
        (-1, 0, 4), (-1, 4, 4), (-1, 8, 4), (-1, 12, 1),
    ]  # fmt: skip
    assert told[-1] == Progress(compared=Bytes(200), sent=Bytes(0), whole=Bytes(200))


def test_only_pieces_that_differ_are_sent_and_zeros_as_such() -> None:
    new = bytearray(filled(200, 1))
    new[0:16] = bytes(16)  # not a hole: it was written
    new[100:101] = b"x"
    new[199:200] = b"y"
    both = Sides(bytes(new), filled(200, 1))
    told = both.bring()
    assert both.theirs.content == new
    assert [(one.offset, one.length, one.kind) for one in both.sent] == [
        (0, 16, write_log.ZEROS), (96, 16, write_log.DATA), (192, 8, write_log.DATA),
    ]  # fmt: skip
    assert told[-1].sent == 40


def test_holes_are_the_same_as_zeros_that_were_written() -> None:
    both = Sides(bytes(200), bytes(64) + b"x" + bytes(135))
    both.bring()
    assert [(one.offset, one.length, one.kind) for one in both.sent] == [(64, 16, write_log.ZEROS)]
    assert both.theirs.content == bytes(200)


@pytest.mark.parametrize("change", [
    lambda told: Digests(file=told.file, first=told.first, data=told.data[8:]),
    lambda told: Digests(file=told.file, first=told.first + 1, data=told.data),
    lambda told: Digests(file=told.file - 1, first=told.first, data=told.data),
], ids=["too few", "of other pieces", "of another disk"])  # fmt: skip
def test_where_an_answer_does_not_fit_all_is_sent(change: Callable[[Digests], Digests]) -> None:
    both = Sides(filled(200, 1), filled(200, 1))
    both.change = change
    assert both.bring()[-1].sent == 200
    assert both.theirs.content == both.ours.content


@pytest.mark.parametrize("seed", range(300))
def test_whenever_the_guest_writes_the_standby_is_in_the_end_what_it_is(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice((16, 100, 200, 208))
    both = Sides(filled(size, seed), filled(size, seed + chance.randrange(2)))

    def moment() -> None:
        if chance.random() < 0.3:
            both.settle()
        if chance.random() < 0.4:
            offset = chance.randrange(size)
            data = chance.choice((chance.randbytes(40), bytes(40)))[: size - offset]
            both.write(offset, data, late=chance.random() < 0.5)

    both.moment = moment
    both.bring()
    both.settle()
    both.drain()
    assert both.theirs.content == both.ours.content


def test_a_log_that_is_read_at_another_time_would_lose_writes() -> None:
    """Why it may be emptied only between two steps: what was read before goes over it."""
    both = Sides(filled(64, 1), filled(64, 2))

    def written_and_drained(told: Digests) -> Digests:
        both.write(0, b"new")
        both.drain()
        return told

    both.change = written_and_drained
    both.bring()
    assert both.ours.content[:3] == b"new"
    assert both.theirs.content[:3] == filled(64, 1)[:3]
