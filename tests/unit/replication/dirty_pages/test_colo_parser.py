"""QEMU's COLO stream: a conversation cut anywhere, out of order, too long, or none at all."""

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.colo_streams import (
    COMMAND,
    DEVICES,
    FIRST,
    HEAD,
    STATE,
    TAIL,
    checkpoint,
    opening,
    word,
)
from tests.support.streams import Collected
from vmckpt.capture.qemu_stream.header import (
    EOF,
    PAGE,
    parse_head,
)
from vmckpt.errors import StreamDamaged
from vmckpt.replication.dirty_pages import colo_parser
from vmckpt.replication.dirty_pages.colo_parser import ColoParser, Stage


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
