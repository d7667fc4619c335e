"""QEMU's COLO stream: a conversation cut anywhere, out of order, too long, or none at all."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.streams import Collected
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.qemu_stream.header import (
    DESCRIPTION,
    EOF,
    FULL,
    PAGE,
    Head,
    RamBlock,
    parse_head,
)
from vmckpt.capture.qemu_stream.stream import StreamWriter
from vmckpt.errors import CannotCapture, StreamDamaged
from vmckpt.replication.dirty_pages import colo_parser
from vmckpt.replication.dirty_pages.colo_parser import ColoParser, Stage
from vmckpt.replication.dirty_pages.colo_state import Gathered, paused, without_description
from vmckpt.replication.dirty_pages.finder import Changed

HEAD = Head(
    machine="pc-i440fx-7.2", section=2, instance=0, version=4, footers=True,
    blocks=(RamBlock("pc.ram", 16 * PAGE), RamBlock("pc.bios", 4 * PAGE)),
)  # fmt: skip
COMMAND = bytes.fromhex("08 0008 0000")
DEVICES = struct.pack(">BI", FULL, 7) + b"\x05timer" + bytes(20) + b"\x7e" + bytes(4)
DESCRIBED = json.dumps({"devices": []}).encode()
TAIL = DEVICES + bytes([EOF, DESCRIPTION]) + struct.pack(">I", len(DESCRIBED)) + DESCRIBED
STATE = DEVICES + bytes([EOF])


def word(number: int) -> bytes:
    return struct.pack(">I", number)


def pages(block: str, *numbers: int, fill: int) -> bytes:
    out: list[bytes] = []
    writer = StreamWriter(HEAD, lambda data: out.append(bytes(data)))
    addresses = np.array(numbers, dtype=np.uint64) * np.uint64(PAGE)
    writer.pages(block, addresses, np.full((len(numbers), PAGE), fill, dtype=np.uint8))
    return b"".join(out)


def opening() -> bytes:
    """The head as QEMU writes it with COLO: a command before memory."""
    plain = HEAD.written()
    at = plain.index(HEAD.machine.encode()) + len(HEAD.machine) if HEAD.machine else 0
    return plain[:at] + COMMAND + plain[at:]


FIRST = opening() + pages("pc.ram", *range(16), fill=1) + pages("pc.bios", 0, 1, fill=9) + TAIL


def checkpoint(*numbers: int, fill: int, state: bytes = STATE) -> bytes:
    """What QEMU sends after our reply."""
    memory = pages("pc.ram", *numbers, fill=fill) if numbers else b""
    sized = word(colo_parser.SIZE) + struct.pack(">Q", len(state)) + state
    return word(colo_parser.SEND) + memory + bytes([EOF]) + sized


class Conversation:
    """Both sides, with what QEMU says cut in pieces."""

    def __init__(self, cut: Callable[[bytes], list[bytes]] = lambda data: [data]) -> None:
        self.sink, self._cut = Collected(), cut
        self.parser = ColoParser(self.sink)

    def hears(self, data: bytes) -> None:
        for piece in self._cut(data):
            self.parser.feed(piece)

    def stage(self) -> Stage:
        return self.parser.stage

    def begins(self) -> None:
        self.hears(FIRST)
        assert self.parser.ready() == word(colo_parser.READY)

    def asked(self) -> None:
        self.begins()
        self.hears(word(colo_parser.REQUEST))
        assert self.parser.reply() == word(colo_parser.REPLY)


def in_pieces(step: int) -> Callable[[bytes], list[bytes]]:
    return lambda data: [data[at : at + step] for at in range(0, len(data), step)]


@pytest.mark.parametrize("step", [1, 3, 7, 4099, 1 << 20])
def test_it_does_not_matter_where_a_conversation_is_cut(step: int) -> None:
    talk = Conversation(in_pieces(step))
    talk.begins()
    assert talk.parser.state == TAIL
    assert talk.sink.memory["pc.bios"][: 2 * PAGE] == b"\x09" * 2 * PAGE
    for turn in range(3):
        assert talk.stage() is Stage.OPEN
        talk.hears(word(colo_parser.REQUEST))
        assert talk.stage() is Stage.ASKED
        talk.parser.reply()
        talk.hears(checkpoint(turn, turn + 5, fill=turn + 2))
        assert talk.stage() is Stage.WHOLE
        assert talk.parser.state == STATE
        assert talk.sink.memory["pc.ram"][turn * PAGE] == turn + 2
        assert talk.parser.loaded() == word(colo_parser.RECEIVED) + word(colo_parser.LOADED)
    assert talk.sink.memory["pc.ram"][15 * PAGE] == 1
    assert talk.sink.tail_bytes == b""


@given(st.lists(st.integers(1, 5000), max_size=20), st.binary(max_size=100))
def test_any_cut_and_any_device_state_is_whole(sizes: list[int], content: bytes) -> None:
    def cut(data: bytes) -> list[bytes]:
        edges = np.cumsum([0, *sizes]).tolist()
        return [data[a:b] for a, b in zip(edges, [*edges[1:], len(data)], strict=True)]

    talk = Conversation(cut)
    talk.asked()
    talk.hears(checkpoint(3, fill=7, state=content + bytes([EOF])))

    assert talk.stage() is Stage.WHOLE
    assert talk.parser.state == content + bytes([EOF])


def test_a_checkpoint_may_be_without_any_page() -> None:
    talk = Conversation()
    talk.asked()
    talk.hears(checkpoint(fill=0))

    assert talk.stage() is Stage.WHOLE


@given(st.integers(0, len(FIRST) - 1))
def test_a_first_pass_that_is_not_whole_is_not_gone_on_from(length: int) -> None:
    talk = Conversation()
    talk.hears(FIRST[:length])
    with pytest.raises(StreamDamaged):
        talk.parser.ready()


@given(st.binary(min_size=4, max_size=9000), st.sampled_from(["begins", "asked", "memory"]))
def test_garbage_is_a_named_error_or_not_whole(garbage: bytes, when: str) -> None:
    talk = Conversation()
    talk.asked() if when != "begins" else talk.begins()
    if when == "memory":
        talk.hears(word(colo_parser.SEND))
    try:
        talk.hears(garbage)
    except StreamDamaged:
        return
    assert talk.stage() is not Stage.OPEN


@given(st.integers(0, len(checkpoint(1, 2, fill=3)) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_a_named_error_or_another_content(at: int, flip: int) -> None:
    data = bytearray(checkpoint(1, 2, fill=3))
    data[at] ^= flip
    talk = Conversation()
    talk.asked()
    try:
        talk.hears(bytes(data))
    except StreamDamaged:
        return
    assert talk.parser.stage in (Stage.MEMORY, Stage.STATE, Stage.WHOLE)


@pytest.mark.parametrize("number", [0, 2, 3, 4, 5, 6, 7, 0xFFFFFFFF])
def test_what_is_said_out_of_turn_is_damage(number: int) -> None:
    talk = Conversation()
    talk.begins()
    with pytest.raises(StreamDamaged, match="message"):
        talk.hears(word(number))


def test_qemu_says_nothing_while_it_waits_for_us() -> None:
    talk = Conversation()
    talk.begins()
    with pytest.raises(StreamDamaged):
        talk.hears(word(colo_parser.REQUEST) * 2)

    talk = Conversation()
    talk.asked()
    with pytest.raises(StreamDamaged):
        talk.hears(checkpoint(1, fill=3) + word(colo_parser.REQUEST))


def test_our_answers_have_their_turn_too() -> None:
    talk = Conversation()
    for answer in (talk.parser.reply, talk.parser.loaded, talk.parser.ready):
        with pytest.raises(StreamDamaged):
            answer()


@pytest.mark.parametrize("size", [0, colo_parser.MOST_STATE + 1, 1 << 63])
def test_a_device_state_of_no_or_too_great_a_size_is_damage(size: int) -> None:
    talk = Conversation()
    talk.asked()
    with pytest.raises(StreamDamaged, match="device state of"):
        talk.hears(
            word(colo_parser.SEND) + bytes([EOF]) + word(colo_parser.SIZE) + struct.pack(">Q", size)
        )


def test_a_first_pass_does_not_take_all_our_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colo_parser, "MOST_STATE", len(TAIL) - 1)
    with pytest.raises(StreamDamaged, match="more than"):
        Conversation().hears(FIRST)


def test_a_device_state_without_its_end_is_damage() -> None:
    talk = Conversation()
    talk.asked()
    with pytest.raises(StreamDamaged, match="without its end"):
        talk.hears(checkpoint(1, fill=3, state=DEVICES + b"\x01"))


def test_the_head_loses_the_mark_of_colo_and_takes_no_other_command() -> None:
    head, length = parse_head(opening() + b"\0")

    assert length == len(opening())
    assert head.written() == HEAD.written()
    for wrong in (bytes.fromhex("0800010000"), bytes.fromhex("0800080001")):
        with pytest.raises(StreamDamaged, match="command"):
            parse_head(opening().replace(COMMAND, wrong) + b"\0")


def test_the_state_of_a_first_pass_is_that_of_a_checkpoint_but_for_its_description() -> None:
    assert without_description(TAIL) == STATE
    assert without_description(STATE) == STATE


def test_a_guest_that_was_noted_as_running_is_noted_as_paused() -> None:
    noted = b"\x0bglobalstate" + bytes(4) + word(1)
    running = noted + word(8) + b"running".ljust(100, b"\0") + STATE

    assert paused(running) == noted + word(7) + b"paused".ljust(100, b"\0") + STATE
    assert paused(STATE) == STATE
    assert paused(running * 2) == running * 2


@pytest.fixture
def last() -> Iterator[Mapping]:
    file = os.memfd_create("last")
    os.ftruncate(file, 16 * PAGE)
    with Mapping(file, 16 * PAGE, write=True) as mapping:
        os.close(file)
        yield mapping


def gathered(last: Mapping, *, most: int = 100) -> tuple[Gathered, ColoParser]:
    """What a conversation comes to, after its first pass."""
    files = [MemoryFile(("pc.ram", "/objects/pc.ram"), 16 * PAGE, Path("/nowhere"))]
    sink = Gathered(files, [last], most=most)
    parser = ColoParser(sink)
    parser.feed(FIRST)
    parser.ready()
    return sink, parser


def test_of_the_first_pass_only_what_differs_from_the_last_copy_counts(last: Mapping) -> None:
    last.pages[:10] = np.uint64(0x0101010101010101)
    sink, _ = gathered(last)
    (found,) = sink.changed()

    assert found.whole.tolist() == list(range(10, 16))
    assert found.numbers.tolist() == []
    assert (last.pages == np.uint64(0x0101010101010101)).all()
    assert last.written[10:].all()
    assert sink.private["pc.bios"][1, 0] == 9


def test_of_a_page_that_comes_twice_the_later_counts(last: Mapping) -> None:
    sink, parser = gathered(last)
    sink.changed()
    parser.feed(word(colo_parser.REQUEST))
    parser.reply()
    memory = pages("pc.ram", 5, 3, fill=6) + pages("pc.ram", 3, fill=7)
    parser.feed(word(colo_parser.SEND) + memory + bytes([EOF]))
    (found,) = sink.changed()

    assert found.numbers.tolist() == [3, 5]
    assert (found.pages.view(np.uint8)[:, 0]).tolist() == [7, 6]
    assert (last.pages[3].view(np.uint8) == 1).all()


def test_pages_beyond_what_is_kept_aside_go_to_the_last_copy(last: Mapping) -> None:
    sink, parser = gathered(last, most=2)
    sink.changed()
    parser.feed(word(colo_parser.REQUEST))
    parser.reply()
    memory = pages("pc.ram", 5, fill=6) + pages("pc.ram", 1, 5, 9, fill=7)
    parser.feed(word(colo_parser.SEND) + memory + bytes([EOF]))
    (found,) = sink.changed()

    assert sorted([*found.numbers.tolist(), *found.whole.tolist()]) == [1, 5, 9]
    newest = last.pages.copy()
    newest[found.numbers] = found.pages
    assert newest.view(np.uint8).reshape(16, PAGE)[[1, 5, 9], 0].tolist() == [7, 7, 7]
    last.pages[:] = newest
    assert sink.changed()[0].count == 0


def test_zeros_are_pages_too_after_the_first_pass(last: Mapping) -> None:
    sink, parser = gathered(last)
    sink.changed()
    parser.feed(word(colo_parser.REQUEST))
    parser.reply()
    out: list[bytes] = []
    writer = StreamWriter(HEAD, lambda data: out.append(bytes(data)))
    writer.zeros("pc.ram", np.array([PAGE], dtype=np.uint64))
    parser.feed(word(colo_parser.SEND) + b"".join(out) + bytes([EOF]))
    (found,) = sink.changed()

    assert found.numbers.tolist() == [1]
    assert not found.pages.any()


def test_memory_that_is_in_no_file_we_know_is_refused(last: Mapping) -> None:
    files = [MemoryFile(("ram-node0",), 16 * PAGE, Path("/nowhere"))]
    with pytest.raises(CannotCapture):
        ColoParser(Gathered(files, [last], most=1)).feed(FIRST)


def test_pages_of_an_epoch_that_was_not_sent_come_with_the_next(last: Mapping) -> None:
    sink, parser = gathered(last)
    sink.changed()
    found = Changed(numbers=np.zeros(0, dtype=np.intp), pages=last.pages[:0])
    for fill, numbers in ((6, (3, 5, 8)), (7, (5, 9))):
        parser.feed(word(colo_parser.REQUEST))
        parser.reply()
        parser.feed(checkpoint(*numbers, fill=fill))
        parser.loaded()
        (found,) = sink.changed()
        if fill == 6:
            # Of the three one was sent before the line broke.
            last.pages[8] = found.pages[found.numbers.tolist().index(8)]

    assert found.numbers.tolist() == [3, 5, 9]
    assert found.pages.view(np.uint8)[:, 0].tolist() == [6, 7, 7]
