"""The NBD server with QEMU's programs as its clients, and with ones that mean no good."""

import json
import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.nbd_peers import image, run
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, Extent
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput, HypervisorError, StoreDamaged
from vmckpt.units import MIB

SIZE = 24 * MIB + 512
CONTENT = random.Random(4).randbytes(2 * MIB) + bytes(20 * MIB) + b"\7" * (2 * MIB + 512)
HOLE = wire.HOLE | wire.ZERO


def extents(offset: int, length: int) -> Iterator[tuple[int, bool]]:
    while length > 0:
        until = next(end for end in (2 * MIB, 22 * MIB, SIZE) if end > offset)
        yield until - offset, until == 22 * MIB
        offset, length = until, length - (until - offset)


EXPORT = Export(SIZE, lambda offset, length: CONTENT[offset : offset + length], extents)


@contextmanager
def serving(folder: Path, **exports: Export) -> Iterator[Server]:
    with Server(exports or {"vda": EXPORT}, Unix(str(folder / "served.sock"))) as server:
        yield server
    assert not (folder / "served.sock").exists()
    assert [t.name for t in threading.enumerate() if t.name.startswith("NBD")] == []


def test_qemu_img_finds_the_same_bytes_and_the_holes(tmp_path: Path) -> None:
    copy = tmp_path / "copy.raw"
    with serving(tmp_path) as server:
        uri = server.uri("vda")
        told = json.loads(run("qemu-img", "info", "--output=json", uri))
        mapped = json.loads(run("qemu-img", "map", "--output=json", uri))
        run("qemu-img", "convert", "-f", "raw", "-O", "raw", uri, copy)
        listed = run("qemu-nbd", "-L", "-k", server.place.path)

    assert told["virtual-size"] == SIZE
    assert [(e["start"], e["length"], e["zero"]) for e in mapped] == [
        (0, 2 * MIB, False), (2 * MIB, 20 * MIB, True), (22 * MIB, 2 * MIB + 512, False),
    ]  # fmt: skip
    assert copy.read_bytes() == CONTENT
    assert "exports available: 1" in listed
    assert "'vda'" in listed
    assert "base:allocation" in listed


def test_it_serves_as_the_backing_of_an_overlay(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        overlay = tmp_path / "overlay.qcow2"
        run("qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", server.uri(), overlay)
        run("qemu-io", "-f", "qcow2", "-c", "write -P 9 1M 4k", "-c", "read -P 7 23M 1M", overlay)
        run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", overlay, tmp_path / "flat.raw")

    expected = bytearray(CONTENT)
    expected[MIB : MIB + 4096] = b"\x09" * 4096
    # qcow2 counts in sectors, and so does this disk.
    assert (tmp_path / "flat.raw").read_bytes() == expected


def test_nothing_can_be_written(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        done = subprocess.run(
            ["qemu-io", "-f", "raw", "-c", "write 0 64k", server.uri()],
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert done.returncode != 0
    assert "Permission denied" in done.stderr


def test_our_own_client_gets_extents_and_data(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as server,
        Client(server.place, "vda", host="here", contexts=[wire.ALLOCATION]) as disk,
    ):
        assert (disk.size, disk.read_only) == (SIZE, True)
        pieces = list(disk.read_many([(0, SIZE)]))
        assert b"".join(piece.content() for piece in pieces) == CONTENT
        assert sum(piece.length for piece in pieces if piece.data is None) == 20 * MIB
        assert list(disk.extents(wire.ALLOCATION)) == [
            Extent(0, 2 * MIB, 0), Extent(2 * MIB, 20 * MIB, HOLE),
            Extent(22 * MIB, 2 * MIB + 512, 0),
        ]  # fmt: skip


def test_several_clients_read_several_exports_at_once(tmp_path: Path) -> None:
    other = Export(MIB, lambda _offset, length: b"\3" * length)
    failures: list[BaseException] = []

    def reader(name: str, expected: bytes) -> None:
        try:
            for _ in range(3):
                with Client(server.place, name, host="here") as disk:
                    assert disk.read(0, disk.size) == expected
        except BaseException as exc:
            failures.append(exc)
            raise

    with serving(tmp_path, vda=EXPORT, vdb=other) as server:
        wanted = {"": CONTENT, "vda": CONTENT, "vdb": b"\3" * MIB}
        threads = [threading.Thread(target=reader, args=one) for one in wanted.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert failures == []


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


def test_it_ends_though_a_client_takes_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        disk = Client(server.place, "vda", host="here")
        for handle in range(9):
            order = wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, 0, handle, 22 * MIB, 2 * MIB)
            disk._line.send(order)
        time.sleep(0.1)
        assert server.clients == 1
        began = time.monotonic()
    disk.close()

    assert time.monotonic() - began < 3.0


def raw(server: Server) -> socket.socket:
    assert isinstance(server.place, Unix)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(5.0)
    made.connect(server.place.path)
    return made


def option(number: int, body: bytes = b"") -> bytes:
    return wire.OPTION.pack(wire.OPTION_MAGIC, number, len(body)) + body


def named(name: bytes, more: bytes) -> bytes:
    return struct.pack(">I", len(name)) + name + more


GO = option(wire.OPT_GO, named(b"vda", b"\0\0"))


def order(kind: int, offset: int, length: int, *, flags: int = 0) -> bytes:
    return wire.REQUEST.pack(wire.REQUEST_MAGIC, flags, kind, 5, offset, length)


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


def test_it_listens_only_where_nobody_else_can_reach_or_is(tmp_path: Path) -> None:
    file, left = tmp_path / "file", tmp_path / "left"
    file.write_text("mine")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    for place, why in (
        (Unix(str(file)), "something else"),
        (Unix(str(tmp_path / "no" / "folder")), "cannot listen"),
    ):
        with pytest.raises(BadInput, match=why):
            Server({"vda": EXPORT}, place)
    with Server({"vda": EXPORT}, Unix(str(left))) as server:
        assert left.stat().st_mode & 0o777 == 0o600
        with pytest.raises(BadInput, match="another server"):
            Server({"vda": EXPORT}, Unix(str(left)))
        with Client(server.place, "", host="here") as disk:
            assert disk.size == SIZE
    assert file.read_text() == "mine"


def test_what_it_serves_may_be_an_image_of_any_format(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "1M", "write -P 5 0 1M").read_bytes()
    export = Export(len(path), lambda offset, length: path[offset : offset + length])
    with serving(tmp_path, vda=export) as server:
        words = ["qemu-io", "-r", "--image-opts", "-c", "read -P 5 0 1M"]
        run(*words, f"driver=qcow2,file.driver=nbd,file.path={server.place},file.export=vda")
