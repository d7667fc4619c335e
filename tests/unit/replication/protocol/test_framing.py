"""Frames on a connection that is cut anywhere, damaged, too long, too new or another's."""

import struct
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire import DATA, SEAL, TOKEN, U64, read, write
from vmckpt.replication.protocol.framing import MOST, Reader, parts
from vmckpt.replication.protocol.messages import (
    Ack,
    CutOff,
    Damaged,
    DeviceState,
    Digests,
    End,
    EpochEnd,
    Heartbeat,
    Hello,
    HelloAck,
    Message,
    PageRequest,
    Pages,
    Part,
    PeerRefused,
    TooLong,
    TooNew,
    WireError,
    Writes,
    WrongToken,
)

U32 = st.integers(0, (1 << 32) - 1)


I32 = st.integers(-(1 << 31), (1 << 31) - 1)


TEXT = st.text(max_size=40)


TIME = st.floats(allow_nan=False, allow_infinity=False)


PARTS: st.SearchStrategy[Part] = st.one_of(
    st.builds(Pages, epoch=U64, file=U32, data=DATA),
    st.builds(Writes, epoch=U64, disk=U32, data=DATA),
    st.builds(DeviceState, epoch=U64, data=DATA),
)


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, session=TEXT, captured=U64),
    st.builds(HelloAck, session=TEXT, committed=U64),
    PARTS,
    st.builds(
        EpochEnd,
        epoch=U64,
        base=U64,
        messages=U32,
        digest=st.binary(min_size=16, max_size=16),
        final=st.booleans(),
        taken=TIME,
    ),
    st.builds(Ack, epoch=U64),
    st.builds(Heartbeat, sent=TIME, note=DATA),
    st.builds(Digests, file=I32, first=U64, data=DATA.map(lambda data: data[: len(data) // 8 * 8])),
    st.builds(PageRequest, file=I32, first=U64, count=U32),
    st.builds(PeerRefused, why=TEXT),
    st.builds(End, why=TEXT),
)


@given(st.lists(MESSAGES, max_size=5), st.lists(st.integers(1, 2000), max_size=8))
def test_messages_come_back_as_they_were_wherever_the_connection_cuts_them(
    messages: list[Message], cuts: list[int]
) -> None:
    data = b"".join(write(message, token=TOKEN) for message in messages)

    assert read(data, cuts) == messages


def test_bytes_may_come_one_by_one() -> None:
    messages: list[Message] = [SEAL, Ack(epoch=3), Pages(epoch=4, file=1, data=b"abc")]
    data = b"".join(write(message, token=TOKEN) for message in messages)

    assert read(data, range(1, len(data))) == messages


def test_a_large_body_is_not_copied() -> None:
    data = bytes(1000)

    assert parts(Pages(epoch=1, file=0, data=data), token=TOKEN)[1] is data


def test_a_frame_lies_as_the_format_says() -> None:
    told = write(Pages(epoch=5, file=2, data=b"abc"), token=9)

    assert told[:28] == bytes.fromhex(
        "564d4352 0001 0003 0000000000000009 0000000000000005 00000007"
    )
    assert told[28:44] == blake3(told[:28] + told[44:]).digest(16)
    assert told[44:] == b"\0\0\0\x02abc"


@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_any_flipped_bit_is_found(messages: list[Message], data: st.DataObject) -> None:
    whole = bytearray(b"".join([write(message, token=TOKEN) for message in messages]))
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[at // 8] ^= 1 << at % 8

    with pytest.raises(WireError):
        read(bytes(whole))


def test_every_single_bit_of_a_seal_counts() -> None:
    whole = write(SEAL, token=TOKEN)

    for at in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(WireError):
            read(bytes(flipped))


@given(st.lists(MESSAGES, max_size=3), st.binary(max_size=100), st.lists(st.integers(1, 500)))
def test_garbage_gives_nothing_but_errors_of_the_wire(
    messages: list[Message], garbage: bytes, cuts: list[int]
) -> None:
    data = b"".join(write(message, token=TOKEN) for message in messages)

    try:
        found = read(data + garbage, cuts)
    except WireError:
        return
    assert (found, garbage) == (messages, b"")


@given(MESSAGES, st.integers(1, 400))
def test_a_connection_that_ends_in_a_message_is_named(message: Message, left: int) -> None:
    whole = write(message, token=TOKEN)
    left = 1 + left % (len(whole) - 1)

    with pytest.raises(CutOff, match=f"{left} bytes into a message"):
        read(whole[:left])


def test_the_lease_alone_says_whose_word_counts() -> None:
    told = write(Ack(epoch=1), token=8)

    with pytest.raises(WrongToken, match="sent token 8"):
        Reader(token=7).feed(told)
    with pytest.raises(WrongToken, match="sent token 8"):
        Reader(token=lambda token: token > 8).feed(told)
    assert Reader(token=lambda token: token >= 8).feed(told) == [Ack(epoch=1)]


def test_a_damaged_token_is_no_wrong_one() -> None:
    told = bytearray(write(Ack(epoch=1), token=TOKEN))
    told[15] ^= 1

    with pytest.raises(Damaged):
        Reader(token=TOKEN).feed(bytes(told))


def test_a_newer_version_is_told_by_six_bytes_and_names_both() -> None:
    with pytest.raises(TooNew, match="versions of the protocol, 1 and 9; run vmckpt unprotect"):
        Reader(token=TOKEN).feed(b"VMCR\0\x09")


def test_a_body_is_too_long_before_any_of_it_is_there() -> None:
    header = struct.pack(">4sHHQQI", b"VMCR", 1, 3, TOKEN, 1, MOST + 1)

    with pytest.raises(TooLong, match="33554433 bytes, but at most 33554432"):
        Reader(token=TOKEN).feed(header + bytes(16))


def test_the_longest_body_goes_through_and_no_longer_one() -> None:
    longest = Pages(epoch=1, file=0, data=bytes(MOST - 4))

    assert read(write(longest, token=TOKEN), range(1, MOST, 1 << 20)) == [longest]
    with pytest.raises(TooLong):
        write(replace(longest, data=bytes(MOST - 3)), token=TOKEN)


def test_after_an_error_a_reader_takes_nothing_more() -> None:
    reader = Reader(token=TOKEN)
    with pytest.raises(Damaged):
        reader.feed(b"nothing")

    with pytest.raises(Damaged):
        reader.feed(write(Ack(epoch=1), token=TOKEN))
    reader.close()
