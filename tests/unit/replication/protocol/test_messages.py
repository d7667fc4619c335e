import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

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
    Tally,
    TooLong,
    TooNew,
    WireError,
    Writes,
    WrongToken,
)

TOKEN = 7
HEAD = 44
U16 = st.integers(0, (1 << 16) - 1)
U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
I32 = st.integers(-(1 << 31), (1 << 31) - 1)
DATA = st.binary(max_size=300)
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
SEAL = EpochEnd(epoch=1, base=0, messages=0, digest=Tally().digest(), final=False, taken=0.0)


def frame(kind: int, body: bytes, *, epoch: int = 0, version: int = 1, token: int = TOKEN) -> bytes:
    """A frame whose digest is right, whatever it says."""
    header = struct.pack(">4sHHQQI", b"VMCR", version, kind, token, epoch, len(body))
    return header + blake3(header + body).digest(16) + body


def write(message: Message, *, token: int) -> bytes:
    return b"".join(parts(message, token=token))


def read(data: bytes, cuts: Sequence[int] = ()) -> list[Message]:
    """The messages of a connection that brings `data` in pieces and then ends."""
    reader = Reader(token=TOKEN)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    found = [
        message for first, last in pairwise(edges) for message in reader.feed(data[first:last])
    ]
    reader.close()
    return found


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


@given(U16, DATA, U64)
def test_a_body_that_nobody_sends_is_damaged_or_a_message_that_can_be_told_again(
    kind: int, body: bytes, epoch: int
) -> None:
    for one in (kind, kind % 14):
        told = frame(one, body, epoch=epoch)
        try:
            (message,) = read(told)
        except Damaged:
            continue
        (again,) = read(write(message, token=TOKEN))
        assert again == message


@given(MESSAGES, st.integers(1, 400))
def test_a_connection_that_ends_in_a_message_is_named(message: Message, left: int) -> None:
    whole = write(message, token=TOKEN)
    left = 1 + left % (len(whole) - 1)

    with pytest.raises(CutOff, match=f"{left} bytes into a message"):
        read(whole[:left])


@pytest.mark.parametrize(
    ("data", "what"),
    [
        pytest.param(b"G", "begins with b'G'", id="magic"),
        pytest.param(b"VMCS", "begins with b'VMCS'", id="last of the magic"),
        pytest.param(frame(7, b"", version=0), "version 0", id="version"),
        pytest.param(frame(99, b""), "kind 99", id="kind"),
        pytest.param(frame(0, b""), "kind 0", id="no kind"),
        pytest.param(frame(1, bytes(7)), "Hello of 7 bytes", id="short"),
        pytest.param(frame(7, b"x", epoch=1), "Ack of 1 bytes", id="long"),
        pytest.param(frame(1, bytes(8), epoch=1), "Hello of epoch 1", id="epoch"),
        pytest.param(frame(1, bytes(8) + b"\xff"), "session is no text", id="session"),
        pytest.param(frame(11, b"\xc3"), "why is no text", id="why"),
        pytest.param(frame(8, b"\x7f\xf8" + bytes(6)), "nan is no time", id="beat"),
        pytest.param(
            frame(6, bytes(29) + b"\x7f\xf0" + bytes(6), epoch=1), "inf is no time", id="seal"
        ),
        pytest.param(frame(9, bytes(13)), "1 bytes are no digests", id="digests"),
        pytest.param(frame(7, b"")[:-1] + b"?", "another digest", id="digest"),
    ],
)
def test_what_is_no_message_is_damaged(data: bytes, what: str) -> None:
    with pytest.raises(Damaged, match=what):
        read(data)


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
    with pytest.raises(TooNew, match="version 9, this one 1; upgrade vmckpt"):
        Reader(token=TOKEN).feed(b"VMCR\0\x09")


def test_a_body_is_too_long_before_any_of_it_is_there() -> None:
    header = struct.pack(">4sHHQQI", b"VMCR", 1, 3, TOKEN, 1, MOST + 1)

    with pytest.raises(TooLong, match="33554433 bytes, at most 33554432"):
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


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(Ack(epoch=-1), id="negative"),
        pytest.param(Ack(epoch=1 << 64), id="epoch"),
        pytest.param(Pages(epoch=1, file=-1, data=b""), id="file"),
        pytest.param(replace(SEAL, digest=b"short"), id="digest"),
        pytest.param(replace(SEAL, taken=float("nan")), id="taken"),
        pytest.param(Heartbeat(sent=float("inf"), note=b""), id="sent"),
        pytest.param(Digests(file=0, first=0, data=b"1234567"), id="digests"),
        pytest.param(PeerRefused(why="\ud800"), id="why"),
    ],
)
def test_what_cannot_be_told_is_never_sent(message: Message) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is all that is promised
        write(message, token=TOKEN)
