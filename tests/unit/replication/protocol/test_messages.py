import struct
from dataclasses import replace

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.support.wire import DATA, SEAL, TOKEN, U64, read, write
from vmckpt.replication.protocol.messages import (
    Ack,
    Damaged,
    Digests,
    Heartbeat,
    Message,
    Pages,
    PeerRefused,
)

HEAD = 44
U16 = st.integers(0, (1 << 16) - 1)


def frame(kind: int, body: bytes, *, epoch: int = 0, version: int = 1, token: int = TOKEN) -> bytes:
    """A frame whose digest is right, whatever it says."""
    header = struct.pack(">4sHHQQI", b"VMCR", version, kind, token, epoch, len(body))
    return header + blake3(header + body).digest(16) + body


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


@pytest.mark.parametrize(
    ("data", "what"),
    [
        pytest.param(b"G", "begins with b'G'", id="magic"),
        pytest.param(b"VMCS", "begins with b'VMCS'", id="last of the magic"),
        pytest.param(frame(7, b"", version=0), "version 0", id="version"),
        pytest.param(frame(99, b""), "kind 99", id="kind"),
        pytest.param(frame(0, b""), "kind 0", id="no kind"),
        pytest.param(frame(1, bytes(7)), "Hello with a wrong length of 7 bytes", id="short"),
        pytest.param(frame(7, b"x", epoch=1), "Ack with a wrong length of 1 bytes", id="long"),
        pytest.param(
            frame(1, bytes(8), epoch=1), "Hello with epoch 1; this type has no epoch", id="epoch"
        ),
        pytest.param(frame(1, bytes(8) + b"\xff"), "session is not UTF-8", id="session"),
        pytest.param(frame(11, b"\xc3"), "why is not UTF-8", id="why"),
        pytest.param(frame(8, b"\x7f\xf8" + bytes(6)), "invalid time nan", id="beat"),
        pytest.param(
            frame(6, bytes(29) + b"\x7f\xf0" + bytes(6), epoch=1), "invalid time inf", id="seal"
        ),
        pytest.param(frame(9, bytes(13)), "digests of 1 bytes", id="digests"),
        pytest.param(frame(7, b"")[:-1] + b"?", "wrong digest", id="digest"),
    ],
)
def test_what_is_no_message_is_damaged(data: bytes, what: str) -> None:
    with pytest.raises(Damaged, match=what):
        read(data)


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
