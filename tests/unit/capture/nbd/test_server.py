"""The NBD server with QEMU's programs as its clients, and with ones that mean no good."""

import json
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.nbd_peers import image, run
from tests.support.nbd_served import CONTENT, EXPORT, SIZE, serving
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, Extent
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.errors import BadInput
from vmckpt.units import MIB

HOLE = wire.HOLE | wire.ZERO


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


def test_it_listens_only_where_nobody_else_can_reach_or_is(tmp_path: Path) -> None:
    file, left = tmp_path / "file", tmp_path / "left"
    file.write_text("mine")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    for place, why in (
        (Unix(str(file)), "is not a socket"),
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
