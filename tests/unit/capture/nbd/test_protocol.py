"""What an NBD client and its server agree on first, and servers that greet in no such way."""

import socket
from pathlib import Path

import pytest

from tests.support.nbd_peers import scripted
from tests.support.nbd_scripts import Talk, client, greet, next_option, reply
from vmckpt.capture.nbd import protocol as wire
from vmckpt.errors import HypervisorError

# Servers by a script. They agree to everything, then answer the first request.


def info(*body: bytes) -> Talk:
    def talk(sock: socket.socket) -> None:
        greet(sock)
        reply(sock, next_option(sock), wire.REP_ACK)
        option = next_option(sock)
        for one in body:
            reply(sock, option, wire.REP_INFO, one)
        reply(sock, option, wire.REP_ACK)

    return talk


def endless(sock: socket.socket) -> None:
    greet(sock)
    next_option(sock)
    while True:
        reply(sock, wire.OPT_STRUCTURED_REPLY, wire.REP_INFO, b"\0\1hello")


def chatty(sock: socket.socket) -> None:
    greet(sock)
    reply(sock, next_option(sock), wire.REP_ACK)
    option = next_option(sock)
    while True:
        reply(sock, option, wire.REP_INFO, b"\0\2hello")


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        pytest.param(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.2p1\r\n"), "greet", id="ssh"),
        pytest.param(
            lambda sock: sock.sendall(b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53" + b"\0" * 200),
            "greet", id="oldstyle",
        ),
        pytest.param(
            lambda sock: sock.sendall(wire.GREETING + b"\0\0"),
            "the server is too old to negotiate options", id="old",
        ),
        pytest.param(lambda sock: sock.sendall(wire.GREETING), "closed", id="short"),
        pytest.param(endless, "unexpected data", id="talks-too-much"),
        pytest.param(chatty, "too many replies", id="endless"),
        pytest.param(info(), "size of the export is missing", id="no-size"),
        pytest.param(info(wire.EXPORT_INFO.pack(0, 1 << 63, 1)), "invalid disk size of", id="huge"),
        pytest.param(info(b"\0\0\0"), "malformed information", id="form"),
        pytest.param(info(b"\0"), "malformed information", id="no-kind"),
        pytest.param(info(wire.BLOCK_INFO.pack(3, 0, 1, 1)), "block sizes of 0", id="blocks"),
    ],
)  # fmt: skip
def test_a_wrong_greeting_is_one_clear_line(tmp_path: Path, talk: Talk, why: str) -> None:
    with (
        scripted(tmp_path, talk) as place,
        pytest.raises(HypervisorError, match=why) as caught,
    ):
        client(place)

    assert "\n" not in str(caught.value)


def silent(sock: socket.socket) -> None:
    sock.recv(1)


def test_a_silent_server_is_waited_for_no_longer_than_the_limit(tmp_path: Path) -> None:
    with (
        scripted(tmp_path, silent) as place,
        pytest.raises(HypervisorError, match=r"no answer within 0\.2 s"),
    ):
        client(place, limit=0.2)
