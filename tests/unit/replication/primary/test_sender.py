"""What is sent of an epoch arrives as what the guest was: over a real line, into a real stage."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replicas import SHORT, GuestDisk, GuestMemory, two_ends
from tests.support.staging import Disk, Ram
from vmckpt.replication.backup.epoch_stage import Stage
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.primary import memory as memories
from vmckpt.replication.primary.copied_memory import CopiedMemory
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.sender import Sender
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import DeviceState, EpochEnd, Pages, Writes
from vmckpt.units import BytesPerSecond, Seconds

SIZES = (150, 8)
DISKS = (8192, 4096)
PLACES = st.sets(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=10)


@dataclass
class Both:
    """A guest with its last copy, and a standby."""

    memory: GuestMemory
    copied: CopiedMemory
    disks: list[GuestDisk]
    near: PeerConnection
    far: PeerConnection
    stage: Stage
    ram: list[Ram]
    sinks: list[Disk]

    def __post_init__(self) -> None:
        self.stale = self.copied.stale
        self.number = 0
        self.state: bytes | None = None
        self.sender = self.connected()

    def connected(self) -> Sender:
        return Sender(self.near, self.copied, [disk.log for disk in self.disks])

    def find(self, most: int = 100) -> list[Changed]:
        self.copied._finder._most = most
        return self.copied.changes(lambda work: None)

    def epoch(self, *, most: int = 100, final: bool = False) -> list[object]:
        """Send one, and take it at the other end; what came."""
        changed = self.find(most)
        ends = tuple(disk.log.size() for disk in self.disks)
        made = Epoch(
            changed=changed, state=b"%d devices" % self.number * 50, ends=ends, packets=0,
            pause=Seconds(0.0), phases={},
        )  # fmt: skip
        base, self.number = self.number, self.number + 1
        self.sender.memory(self.number, changed)
        self.sender.writes(self.number, [disk.log.consumed for disk in self.disks], ends)
        self.sender.finish(self.number, made, self.state, base=base, final=final, taken=time.time())
        self.state = made.state
        for disk, end in zip(self.disks, ends, strict=True):
            disk.log.consume(end)
        came = list(self.taken())
        assert self.stage.state() == made.state
        return came

    def taken(self) -> Iterator[object]:
        while True:
            message = self.far.receive(SHORT)
            yield message
            match message:
                case Pages() | Writes() | DeviceState():
                    self.stage.take(message)
                case EpochEnd():
                    self.stage.seal(message)
                    self.stage.apply()
                    return
                case _:
                    raise AssertionError(message)

    def follows(self) -> bool:
        ram = [one.content.tobytes() for one in self.ram]
        sinks = [one.content for one in self.sinks]
        return ram == self.memory.content() and sinks == [one.content for one in self.disks]

    def known(self) -> bool:
        """Whether the last copy is what the standby has."""
        together = zip(self.copied.last, self.ram, strict=True)
        return all(np.array_equal(one.pages, other.content) for one, other in together)


@pytest.fixture
def both() -> Iterator[Both]:
    with two_ends() as ends, ExitStack() as stack:
        folder = ends.primary.parent / "guest"
        folder.mkdir()
        yield made(folder, ends.lines(stack), stack)


def made(folder: Path, lines: tuple[PeerConnection, PeerConnection], stack: ExitStack) -> Both:
    memory = GuestMemory(folder, SIZES, stack)
    copied = CopiedMemory(lambda: memory.files, folder, stack)
    disks = [GuestDisk(folder, number, size, stack) for number, size in enumerate(DISKS)]
    ram = [Ram(np.zeros((size, 512), dtype=np.uint64)) for size in SIZES]
    sinks = [Disk(bytearray(size)) for size in DISKS]
    stage = stack.enter_context(Stage(folder / "stage", folder / "log", ram, sinks))
    return Both(memory, copied, disks, *lines, stage, ram, sinks)


def test_what_changed_arrives_in_all_files_and_disks(both: Both) -> None:
    both.memory.write(0, 149, 5)
    both.memory.write(1, 0, 6)
    both.disks[0].write(100, b"first")
    both.disks[0].write(102, b"second")
    both.disks[1].write(0, bytes([9]) * 4096)
    both.disks[1].trim(512, 512)
    came = both.epoch()
    assert both.follows()
    assert both.known()
    assert [one.file for one in came if isinstance(one, Pages)] == [0, 1]
    assert [one.disk for one in came if isinstance(one, Writes)] == [0, 1]


def test_an_epoch_in_which_nothing_happened_is_a_state_and_a_seal(both: Both) -> None:
    both.epoch()
    assert [type(one) for one in both.epoch()] == [DeviceState, EpochEnd]


def test_a_known_page_travels_as_a_difference_and_a_stale_one_whole(both: Both) -> None:
    both.memory.mapped[0].pages[3] = np.random.default_rng(1).integers(1 << 60, size=512)
    both.epoch()
    both.memory.write(0, 3, 5)
    small = pages(both.epoch())
    both.memory.write(0, 3, 6)
    both.stale[0][3] = True
    whole = pages(both.epoch())
    assert len(small[0].data) < 200
    assert len(whole[0].data) > 3500
    assert both.follows()
    assert not both.stale[0].any()


def test_a_stale_page_that_did_not_change_is_sent_once(both: Both) -> None:
    both.memory.write(0, 7, 1)
    both.epoch()
    both.ram[0].content[7] = 99  # nobody knows what the backup has
    both.stale[0][7] = True
    assert len(pages(both.epoch())) == 1
    assert both.follows()
    assert pages(both.epoch()) == []


def test_pages_beyond_what_is_kept_aside_arrive_whole(both: Both) -> None:
    for turn, most in enumerate((0, 100), start=1):
        for number in range(150):
            both.memory.write(0, number, number + turn)
        sent = pages(both.epoch(most=most))
        assert len(sent) == turn
        assert both.follows()
        assert both.known()


def test_many_pages_are_cut_into_messages(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "MOST_PAGES", 4)
    for number in range(10):
        both.memory.write(0, number, number + 1)
    assert len(pages(both.epoch())) == 3
    assert both.follows()


def test_the_first_copy_belongs_to_no_epoch(both: Both) -> None:
    both.memory.write(0, 2, 2)
    both.sender.memory(0, both.find())
    message = both.far.receive(SHORT)
    assert isinstance(message, Pages)
    assert message.epoch == 0
    both.stage.bulk(message)
    (state, seal) = both.epoch()
    assert isinstance(seal, EpochEnd)
    assert (seal.messages, isinstance(state, DeviceState)) == (1, True)
    assert both.follows()


def test_the_seal_says_what_it_follows_and_whether_it_is_the_last(both: Both) -> None:
    first, last = both.epoch()[-1], both.epoch(final=True)[-1]
    assert isinstance(first, EpochEnd)
    assert isinstance(last, EpochEnd)
    assert (first.epoch, first.base, first.final) == (1, 0, False)
    assert (last.epoch, last.base, last.final) == (2, 1, True)


@settings(max_examples=25)
@given(
    epochs=st.lists(
        st.tuples(PLACES, PLACES, st.sampled_from((0, 5, 100)), st.sampled_from((1, 2))), max_size=4
    )
)
def test_whatever_is_changed_stale_or_too_much_the_standby_follows(
    epochs: list[tuple[set[tuple[int, int]], set[tuple[int, int]], int, int]],
) -> None:
    with two_ends() as ends, ExitStack() as stack:
        folder = ends.primary.parent / "guest"
        folder.mkdir()
        both = made(folder, ends.lines(stack), stack)
        for turn, (written, doubted, most, disk) in enumerate(epochs, start=1):
            for file, number in written:
                both.memory.write(file, number, turn)
            for file, number in doubted:
                both.ram[file].content[number] = 12345
                both.stale[file][number] = True
            both.disks[disk - 1].write(turn * 512, bytes([turn]) * 512)
            both.epoch(most=most)
            assert both.follows()
            assert both.known()
            assert not any(flags.any() for flags in both.stale)


def pages(came: list[object]) -> list[Pages]:
    return [one for one in came if isinstance(one, Pages)]


def test_with_a_limit_no_more_is_sent_than_that(both: Both) -> None:
    rng = np.random.default_rng(7)
    for page in range(100):
        both.memory.mapped[0].pages[page] = rng.integers(0, 2**63, 512, dtype=np.uint64)
    both.sender.bandwidth = BytesPerSecond(2 << 20)
    began, before = time.monotonic(), both.near.sent
    both.epoch()
    took = time.monotonic() - began
    assert took >= (both.near.sent - before) / (2 << 20) * 0.9
    assert took > 0.15
