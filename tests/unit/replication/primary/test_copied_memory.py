"""What of a guest's memory the backup has, found out by digests over a real line."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.replicas import SHORT, GuestMemory, mapped, two_ends
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.primary import memory as memories
from vmckpt.replication.primary.copied_memory import CopiedMemory
from vmckpt.replication.primary.memory import answer
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Digests, PageRequest

SIZES = (50, 7)


class Both:
    """The guest's memory with its last copy, and the standby's."""

    def __init__(
        self, folder: Path, lines: tuple[PeerConnection, PeerConnection], stack: ExitStack
    ) -> None:
        self.folder, self.stack = folder, stack
        self.near, self.far = lines
        self.guest = GuestMemory(folder, SIZES, stack)
        self.memory = CopiedMemory(lambda: self.guest.files, folder, stack)
        sizes = list(enumerate(SIZES))
        self.theirs: list[Mapping] = [
            mapped(folder / f"standby{number}", size, stack) for number, size in sizes
        ]
        self.asked: list[PageRequest] = []

    def compare(self, change: Callable[[Digests], Digests] = lambda told: told) -> int:
        def tell() -> None:
            while isinstance(asked := self.far.receive(SHORT), PageRequest):
                self.asked.append(asked)
                self.far.send(change(answer(asked, self.theirs)))

        teller = threading.Thread(target=tell, daemon=True)
        teller.start()
        try:
            return self.memory.compare(self.near)
        finally:
            self.near.send(Digests(file=0, first=0, data=b""))
            teller.join()

    def stale(self) -> list[list[int]]:
        return [np.flatnonzero(flags).tolist() for flags in self.memory.stale]


@pytest.fixture
def both() -> Iterator[Both]:
    with two_ends() as ends, ExitStack() as stack:
        folder = ends.primary.parent / "guest"
        folder.mkdir()
        yield Both(folder, ends.lines(stack), stack)


def test_what_is_empty_on_both_sides_is_known(both: Both) -> None:
    assert both.compare() == 0
    assert [asked.count for asked in both.asked] == list(SIZES)


def test_pages_that_differ_from_the_last_copy_are_stale_and_no_others(both: Both) -> None:
    both.memory.last[0].pages[3, 5] = 9
    both.memory.last[0].pages[4, 5] = 9
    both.theirs[0].pages[4, 5] = 9
    both.theirs[1].pages[6, 0] = 1
    both.guest.write(0, 20, 1)  # the guest itself is not looked at
    assert both.compare() == 2
    assert both.stale() == [[3], [6]]


def test_what_was_doubted_before_is_known_once_it_is_the_same(both: Both) -> None:
    both.memory.doubt([np.ones(size, dtype=np.bool_) for size in SIZES])
    assert both.compare() == 0
    assert both.stale() == [[], []]


def test_a_large_file_is_asked_for_in_pieces(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "ASKED", 20)
    both.memory.last[0].pages[41, 5] = 9
    assert both.compare() == 1
    assert [(one.first, one.count) for one in both.asked] == [(0, 20), (20, 20), (40, 10), (0, 7)]
    assert both.stale() == [[41], []]


@pytest.mark.parametrize("change", [
    lambda told: Digests(file=told.file, first=told.first, data=told.data[8:]),
    lambda told: Digests(file=told.file, first=told.first + 1, data=told.data),
    lambda told: Digests(file=told.file + 1, first=told.first, data=told.data),
    lambda told: Digests(file=told.file, first=told.first, data=b""),
], ids=["too few", "of other pages", "of another file", "none"])  # fmt: skip
def test_an_answer_that_does_not_fit_makes_all_stale(
    both: Both, change: Callable[[Digests], Digests]
) -> None:
    assert both.compare(change) == sum(SIZES)


def test_a_backup_that_hangs_up_is_told(both: Both) -> None:
    both.far.close()
    with pytest.raises(ConnectionLost):
        both.memory.compare(both.near)


def test_an_epoch_sends_what_changed_and_what_is_stale(both: Both) -> None:
    doubts = [np.zeros(size, dtype=np.bool_) for size in SIZES]
    doubts[1][2] = True
    both.memory.doubt(doubts)
    first = Changed(numbers=np.array([1, 5]), pages=np.zeros((2, 512), dtype=np.uint64),
                    whole=np.array([9]))  # fmt: skip
    none = Changed(numbers=np.zeros(0, dtype=np.intp), pages=np.zeros((0, 512), dtype=np.uint64))
    found = both.memory.flags([first, none])
    assert [np.flatnonzero(one).tolist() for one in found] == [[1, 5, 9], [2]]
    assert both.stale() == [[], [2]]
    both.memory.doubt(found)
    assert both.stale() == [[1, 5, 9], [2]]


def test_a_new_agent_finds_the_last_copy_as_it_was(both: Both) -> None:
    both.memory.last[0].pages[3] = 77
    again = CopiedMemory(lambda: both.guest.files, both.folder, both.stack)
    assert again.last[0].pages[3].tolist() == [77] * 512
    assert bool(again.last[0].written[3])
    assert oct((both.folder / "last-ram0").stat().st_mode & 0o777) == "0o600"


def test_the_guest_s_own_memory_cannot_be_written_by_it(both: Both) -> None:
    with pytest.raises(ValueError, match="read-only"):
        both.memory.live[0].pages[0, 0] = 1


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"file": 2, "first": 0, "count": 1}, IndexError),
        ({"file": -1, "first": 0, "count": 1}, ValueError),
        ({"file": 1, "first": 0, "count": 8}, ValueError),
        ({"file": 1, "first": 8, "count": 0}, ValueError),
        ({"file": 0, "first": 1 << 63, "count": 1}, ValueError),
        ({"file": 0, "first": 0, "count": (1 << 16) + 1}, ValueError),
    ],
)
def test_questions_that_make_no_sense_are_refused(
    both: Both, asked: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        answer(PageRequest(**asked), both.theirs)


def test_a_file_that_joins_is_sent_once_it_is_written(both: Both) -> None:
    (both.folder / "more").mkdir()
    more = GuestMemory(both.folder / "more", (4,), both.stack)
    both.guest.files.insert(1, MemoryFile(("added",), more.files[0].size, more.files[0].path))
    both.guest.write(1, 6, 6)
    assert both.memory.blocks == (("ram0", 50 << 12), ("ram1", 7 << 12))
    assert both.memory.look() == (("ram0", 50 << 12), ("added", 4 << 12), ("ram1", 7 << 12))
    more.write(0, 2, 7)
    both.memory.include(_never)
    assert both.memory.blocks == both.memory.look()
    both.memory.prepare()
    found = both.memory.begin().result()
    assert [one.numbers.tolist() for one in found] == [[], [2], [6]]
    (piece,) = both.memory.pieces(1, found[1])
    assert np.array_equal(piece[1], more.mapped[0].pages[[2]])


def _never(work: Callable[[], object]) -> None:
    raise AssertionError(work)
