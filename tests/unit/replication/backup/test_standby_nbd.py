"""The NBD client that writes: to a real server, and to ones that keep to a script."""

import random
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.nbd_peers import qemu_nbd, run, scripted
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import HypervisorError
from vmckpt.replication.backup.standby import NbdWriter
from vmckpt.replication.disks import write_log
from vmckpt.units import MIB
from vmckpt_lab.machine_speed import Deadline

SIZE = 8 * MIB


def listens(place: Path) -> bool:
    """The name of a socket is there a moment before its server listens."""
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(str(place)) == 0


@contextmanager
def writable(path: Path, kind: str = "raw") -> Iterator[Unix]:
    place = path.with_suffix(".sock")
    words = ["qemu-nbd", "-t", "-f", kind, "-x", "vda", "-k", str(place)]
    words += ["--discard=unmap", str(path)]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as server:
        try:
            until = Deadline(10)
            while not listens(place):
                assert server.poll() is None
                assert not until.passed()
                time.sleep(0.01)
            yield Unix(str(place))
        finally:
            server.kill()


def disk(place: Unix, window: int = 8 * MIB) -> NbdWriter:
    return NbdWriter(place, "vda", host="here", window=window)


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_what_overlaps_lands_in_the_order_of_the_calls(tmp_path: Path, kind: str) -> None:
    image = tmp_path / "disk.img"
    run("qemu-img", "create", "-q", "-f", kind, image, str(SIZE))
    dice, model = random.Random(9), bytearray(SIZE)
    with writable(image, kind) as place, disk(place) as writer:
        for _ in range(1500):
            # Most of them hit the same few clusters.
            offset, length = dice.randrange(300_000), dice.randrange(1, 70_000)
            if dice.random() < 0.2:
                writer.zeros(offset, length)
                model[offset : offset + length] = bytes(length)
            else:
                data = dice.randbytes(length)
                writer.write(offset, data)
                model[offset : offset + length] = data
        writer.flush()
        assert writer.read(0, SIZE) == model

    run("qemu-img", "convert", "-f", kind, "-O", "raw", image, tmp_path / "flat")
    assert (tmp_path / "flat").read_bytes() == model


def test_records_are_done_again(tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    image.write_bytes(b"\1" * SIZE)
    log = write_log.header(4096, MIB) + b"\2" * MIB
    log += write_log.header(2 * MIB, 5 * MIB, write_log.ZEROS)
    log += write_log.header(7 * MIB, MIB, write_log.TRIM)
    log += write_log.header(5000, 3) + b"odd"
    with writable(image) as place, disk(place) as writer:
        for _ in range(2):
            for record in write_log.records(log):
                writer.apply(record)
            writer.flush()

    expected = bytearray(b"\1" * SIZE)
    expected[4096 : 4096 + MIB] = b"\2" * MIB
    expected[5000:5003] = b"odd"
    # A raw image that may be trimmed reads as zeros there.
    expected[2 * MIB :] = bytes(6 * MIB)
    assert image.read_bytes() == expected
    assert image.stat().st_blocks * 512 <= 7 * MIB


def test_a_long_write_is_cut_and_reading_waits_for_it(tmp_path: Path) -> None:
    image, data = tmp_path / "disk.img", random.Random(2).randbytes(SIZE)
    image.write_bytes(bytes(SIZE))
    with writable(image) as place, disk(place, window=MIB) as writer:
        writer.write(0, data)
        assert b"".join(piece.content() for piece in writer.read_many([(0, SIZE)])) == data
        writer.write(0, b"")
        writer.zeros(7, 0)
        writer.flush()


def test_what_is_not_on_the_disk_is_not_asked_for(tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(SIZE))
    with writable(image) as place, disk(place) as writer:
        calls: list[Callable[[], None]] = [
            lambda: writer.write(SIZE - 1, b"ab"),
            lambda: writer.zeros(SIZE, 1),
            lambda: writer.trim(-1, 1),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=str(SIZE)):
                call()
        writer.write(0, b"fine")
        writer.flush()
    assert image.read_bytes()[:4] == b"fine"


def test_an_export_for_reading_is_refused(tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(SIZE))
    with (
        qemu_nbd(image, kind="raw") as place,
        pytest.raises(HypervisorError, match="it is read-only"),
    ):
        disk(place)


def test_a_killed_server_is_told_at_the_flush(tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    image.write_bytes(bytes(SIZE))
    with writable(image) as place:
        writer = disk(place)
    with suppress(HypervisorError):
        writer.write(0, b"x")
    with pytest.raises(HypervisorError, match="here: disk vda"):
        writer.flush()
    writer.close()


def greet(peer: socket.socket, *, structured: bool) -> None:
    """What a server says until an export is chosen."""
    peer.sendall(wire.GREETING + struct.pack(">H", wire.FIXED_NEWSTYLE | wire.NO_ZEROES))
    take(peer, 4)
    while True:
        _, option, length = wire.OPTION.unpack(take(peer, wire.OPTION.size))
        take(peer, length)

        def reply(kind: int, body: bytes = b"", option: int = option) -> None:
            head = wire.OPTION_REPLY.pack(wire.OPTION_REPLY_MAGIC, option, kind, len(body))
            peer.sendall(head + body)

        if option == wire.OPT_STRUCTURED_REPLY:
            reply(wire.REP_ACK if structured else wire.REP_ERR_UNSUP)
            continue
        reply(wire.REP_INFO, wire.EXPORT_INFO.pack(wire.INFO_EXPORT, SIZE, wire.HAS_FLAGS))
        reply(wire.REP_ACK)
        return


def take(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = peer.recv(length - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


def request(peer: socket.socket) -> tuple[int, int, int, int]:
    """The next request's kind, handle, offset and length; its content is thrown away."""
    _, _, kind, handle, offset, length = wire.REQUEST.unpack(take(peer, wire.REQUEST.size))
    if kind == wire.CMD_WRITE:
        take(peer, length)
    return kind, handle, offset, length


def simple(handle: int, error: int = 0) -> bytes:
    return wire.SIMPLE.pack(wire.SIMPLE_MAGIC, error, handle)


def chunk(handle: int, kind: int, body: bytes = b"") -> bytes:
    head = wire.STRUCTURED.pack(wire.STRUCTURED_MAGIC, wire.CHUNK_DONE, kind, handle, len(body))
    return head + body


def test_no_two_requests_under_way_overlap_and_a_flush_comes_alone(tmp_path: Path) -> None:
    most, seen = [0], threading.Event()

    def talk(peer: socket.socket) -> None:
        greet(peer, structured=True)
        peer.settimeout(0.05)
        waiting: list[tuple[int, int, int, int]] = []
        with suppress(ConnectionError):
            while True:
                # As late as can be, and the last first: when the client sends nothing more.
                try:
                    kind, handle, offset, length = request(peer)
                except TimeoutError:
                    for _, answered, _, _ in reversed(waiting):
                        peer.sendall(simple(answered))
                    waiting.clear()
                    continue
                if kind == wire.CMD_DISC:
                    seen.set()
                    return
                assert kind != wire.CMD_FLUSH or not waiting
                for _, _, other, count in waiting:
                    assert offset + length <= other or other + count <= offset
                waiting.append((kind, handle, offset, length))
                most[0] = max(most[0], len(waiting))

    with scripted(tmp_path, talk) as place, disk(place) as writer:
        for number in range(70):
            writer.write(number * 4096, bytes(4096))
        writer.write(0, bytes(8192))
        writer.zeros(4096, 4096)
        writer.trim(6000, 10)
        writer.flush()

    assert seen.wait(10.0)
    assert most[0] == 64


def test_zeros_take_no_room_in_the_window(tmp_path: Path) -> None:
    image = tmp_path / "disk.img"
    run("truncate", "-s", "6G", image)
    with writable(image) as place, disk(place, window=65536) as writer:
        writer.zeros(0, 5 << 30)
        under_way = len(writer._writing)
        writer.write(5 << 30, b"x" * 65536)
        assert len(writer._writing) > 1
        writer.flush()

    assert under_way > 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        pytest.param(
            lambda handle: simple(handle, 28),
            r"writing bytes 512 to 514: No space left", id="simple error",
        ),
        pytest.param(
            lambda handle: chunk(
                handle, wire.CHUNK_ERROR_PLAIN, struct.pack(">IH", 5, 8) + b"too\nhot."
            ),
            r"writing bytes 512 to 514: too hot\.", id="structured error",
        ),
        pytest.param(
            lambda handle: chunk(handle, wire.CHUNK_DATA, struct.pack(">Q", 512) + b"xy"),
            "invalid reply from the server: data that was not", id="data for a write",
        ),
        pytest.param(
            lambda handle: simple(handle + 1), "server: reply to an unknown request",
            id="another's answer",
        ),
        pytest.param(
            lambda handle: simple(handle) + simple(handle),
            "server: reply to an unknown request", id="twice",
        ),
        pytest.param(lambda _: b"x" * 16, "server: reply with an invalid magic", id="noise"),
        pytest.param(lambda _: b"", "closed the connection", id="nothing"),
    ],
)  # fmt: skip
def test_a_wrong_answer_ends_the_connection_with_a_reason(
    tmp_path: Path, answer: Callable[[int], bytes], says: str
) -> None:
    def talk(peer: socket.socket) -> None:
        greet(peer, structured=True)
        _, handle, _, _ = request(peer)
        said = answer(handle)
        peer.sendall(said)
        if said:
            peer.recv(4096)

    with scripted(tmp_path, talk) as place:
        writer = disk(place)
        writer.write(512, b"xy")
        with pytest.raises(HypervisorError, match=says):
            writer.flush()
        with pytest.raises(HypervisorError, match="here: disk vda"):
            writer.write(512, b"xy")
        writer.close()


def test_a_failed_flush_names_no_bytes(tmp_path: Path) -> None:
    def talk(peer: socket.socket) -> None:
        greet(peer, structured=True)
        _, handle, _, _ = request(peer)
        peer.sendall(simple(handle, 5))
        peer.recv(4096)

    with scripted(tmp_path, talk) as place:
        writer = disk(place)
        with pytest.raises(HypervisorError, match=r"\): flushing the disk: Input/output error"):
            writer.flush()
        writer.close()


@pytest.mark.parametrize("structured", [True, False])
def test_both_forms_of_yes_are_understood(tmp_path: Path, structured: bool) -> None:
    def talk(peer: socket.socket) -> None:
        greet(peer, structured=structured)
        with suppress(ConnectionError):
            while True:
                _, handle, _, _ = request(peer)
                peer.sendall(chunk(handle, wire.CHUNK_NONE) if structured else simple(handle))

    with scripted(tmp_path, talk) as place, disk(place) as writer:
        writer.write(0, b"x")
        writer.zeros(0, 4096)
        writer.flush()
        assert writer._writing == {}
