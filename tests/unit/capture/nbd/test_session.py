"""One client of the NBD server: what it gets, and what is refused it."""

import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.nbd_served import CONTENT, SIZE, order, raw, serving
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import HypervisorError, StoreDamaged
from vmckpt.units import MIB


def test_what_cannot_be_read_is_an_error_for_that_read_alone(tmp_path: Path) -> None:
    def read(offset: int, length: int) -> bytes:
        if offset < MIB:
            raise StoreDamaged("packs/ab/cd: a box is not what was sealed")
        if offset < 2 * MIB:
            raise OSError(5, "the cable is out")
        return b"\1" * (length - (offset >= 3 * MIB))

    with serving(tmp_path, vda=Export(4 * MIB, read)) as server:
        for offset, why in ((0, "a box is not"), (MIB, "cable is out"), (3 * MIB, "65535 bytes")):
            with (
                Client(server.place, "vda", host="here") as disk,
                pytest.raises(HypervisorError, match=why),
            ):
                disk.read(offset, 65536)
        with Client(server.place, "vda", host="here") as disk:
            assert disk.read(2 * MIB, 3) == b"\1\1\1"


def test_a_slow_read_keeps_no_other_waiting(tmp_path: Path) -> None:
    gate = threading.Event()

    def read(offset: int, length: int) -> bytes:
        if not offset:
            gate.wait(10.0)
        return bytes(length)

    with (
        serving(tmp_path, vda=Export(MIB, read)) as server,
        Client(server.place, "vda", host="here") as disk,
    ):
        line = wire.NbdSocket(disk._line.socket)
        for handle, offset in ((1, 0), (2, 65536)):
            line.send(wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, 0, handle, offset, 512))
        first = wire.STRUCTURED.unpack(line.take(20))
        gate.set()

    assert first[3] == 2


def option(number: int, body: bytes = b"") -> bytes:
    return wire.OPTION.pack(wire.OPTION_MAGIC, number, len(body)) + body


def named(name: bytes, more: bytes) -> bytes:
    return struct.pack(">I", len(name)) + name + more


GO = option(wire.OPT_GO, named(b"vda", b"\0\0"))


def everything(sock: socket.socket) -> bytes:
    found = b""
    while more := sock.recv(65536):
        found += more
    return found


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4,
        b"\0\0\0\1" + b"\0" * 16,
        b"\0\0\0\1" + option(wire.OPT_GO, b"\xff" * 10),
        b"\0\0\0\1" + option(wire.OPT_GO, named(b"\xff\xfe", b"\0\0")),
        b"\0\0\0\1" + option(wire.OPT_GO, named(b"vda", b"\0\xff")),
        b"\0\0\0\1" + wire.OPTION.pack(wire.OPTION_MAGIC, 99, 1 << 31),
        b"\0\0\0\1" + option(wire.OPT_EXPORT_NAME, b"nothing"),
        b"\0\0\0\1" + option(wire.OPT_SET_META_CONTEXT, named(b"vda", b"\xff\xff\xff\xff")),
        b"\0\0\0\1" + GO + b"\0" * 28,
        b"\0\0\0\1" + GO + order(wire.CMD_WRITE, 0, 1 << 31),
    ],
)
def test_a_client_that_speaks_no_sense_is_sent_away(tmp_path: Path, said: bytes) -> None:
    with serving(tmp_path) as server:
        with raw(server) as sock:
            sock.sendall(said)
            with suppress(ConnectionResetError, BrokenPipeError):
                sock.shutdown(socket.SHUT_WR)
                everything(sock)
        with Client(server.place, "vda", host="here") as disk:
            assert disk.read(22 * MIB, 2) == b"\7\7"


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        pytest.param(order(wire.CMD_READ, SIZE, 1), wire.EINVAL, id="beyond"),
        pytest.param(order(wire.CMD_READ, (1 << 64) - 1, 9), wire.EINVAL, id="far-beyond"),
        pytest.param(order(wire.CMD_READ, 0, 0), wire.EINVAL, id="nothing"),
        pytest.param(order(wire.CMD_WRITE, 0, 3) + b"abc", wire.EPERM, id="write"),
        pytest.param(order(wire.CMD_TRIM, 0, 512), wire.EPERM, id="trim"),
        pytest.param(order(wire.CMD_BLOCK_STATUS, 0, 512), wire.EINVAL, id="status-unasked"),
        pytest.param(order(99, 0, 512), wire.EINVAL, id="unknown"),
    ],
)
def test_what_cannot_be_is_refused_and_the_client_stays(
    tmp_path: Path, asked: bytes, number: int
) -> None:
    with serving(tmp_path) as server, raw(server) as sock:
        sock.sendall(b"\0\0\0\3" + option(wire.OPT_EXPORT_NAME, b"vda"))
        sock.sendall(asked + order(wire.CMD_READ, 22 * MIB, 2) + order(wire.CMD_DISC, 0, 0))
        answer = everything(sock)[16 + 2 + 10 :]

    refused = wire.SIMPLE.pack(wire.SIMPLE_MAGIC, number, 5)
    read = wire.SIMPLE.pack(wire.SIMPLE_MAGIC, 0, 5) + b"\7\7"
    assert answer in (refused + read, read + refused)


def test_a_simple_reader_gets_data_and_holes(tmp_path: Path) -> None:
    with serving(tmp_path) as server, raw(server) as sock:
        sock.sendall(b"\0\0\0\1" + option(wire.OPT_EXPORT_NAME, b""))
        sock.sendall(order(wire.CMD_READ, MIB, 22 * MIB) + order(wire.CMD_DISC, 0, 0))
        answer = everything(sock)

    assert answer[28 : 28 + 124] == bytes(124)
    assert answer[28 + 124 + 16 :] == CONTENT[MIB : 23 * MIB]
