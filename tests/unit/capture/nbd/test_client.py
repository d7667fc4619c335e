"""The NBD client against QEMU's server, and against servers that do not keep to the protocol."""

import socket
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.nbd_peers import image, qemu_nbd, run, scripted, write
from tests.support.nbd_scripts import Talk, client, greet, next_option, reply, take
from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, Extent
from vmckpt.capture.nbd.protocol import Place, Tcp, Unix
from vmckpt.errors import HypervisorError
from vmckpt.units import MIB

CHANGED = "qemu:dirty-bitmap:since"


def test_what_qemu_serves_is_read_whole_and_in_order(tmp_path: Path) -> None:
    path = image(
        tmp_path / "a.qcow2", "40M", "write -P 1 0 3M", "write -P 2 10M 64k", "write -z 20M 1M"
    )
    with qemu_nbd(path) as place, client(place) as disk:
        assert (disk.size, disk.read_only, dict(disk.contexts)) == (40 * MIB, True, {})
        pieces = list(disk.read_many([(0, 40 * MIB)], window=4 * MIB))
        scattered = [(off, 512) for off in range(0, 40 * MIB, 256 * 1024)]
        small = list(disk.read_many(reversed(scattered), window=65536))

    whole = b"".join(piece.content() for piece in pieces)
    expected = bytearray(40 * MIB)
    expected[: 3 * MIB] = b"\1" * (3 * MIB)
    expected[10 * MIB : 10 * MIB + 65536] = b"\2" * 65536
    assert whole == expected
    assert [piece.offset for piece in pieces] == list(range(0, 40 * MIB, MIB))
    assert [piece.data is None for piece in pieces[11:]] == [True] * 29
    assert [piece.offset for piece in small] == [off for off, _ in reversed(scattered)]
    assert all(piece.content() == expected[p : p + 512] for piece in small for p in [piece.offset])


def test_the_allocation_is_told_without_gaps(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "3G", "write -P 1 1M 1M", "write -P 1 2047M 2M")
    with qemu_nbd(path) as place, client(place, wire.ALLOCATION, CHANGED) as disk:
        assert set(disk.contexts) == {wire.ALLOCATION}
        found = list(disk.extents(wire.ALLOCATION))
        part = list(disk.extents(wire.ALLOCATION, 2048 * MIB, 4 * MIB))
        with pytest.raises(KeyError):
            next(disk.extents(CHANGED))

    hole = wire.HOLE | wire.ZERO
    assert [(e.offset // MIB, e.length // MIB, e.flags) for e in found] == [
        (0, 1, hole), (1, 1, 0), (2, 2045, hole), (2047, 2, 0), (2049, 1023, hole),
    ]  # fmt: skip
    assert part == [Extent(2048 * MIB, MIB, 0), Extent(2049 * MIB, 3 * MIB, hole)]


def test_a_dirty_bitmap_tells_what_was_written_since(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "64M", "write -P 1 0 64M")
    run("qemu-img", "bitmap", "--add", path, "since")
    write(path, "write -P 2 8M 1k", "write -P 3 20M 200k", "discard 40M 64k")
    with qemu_nbd(path, "-B", "since") as place, client(place, CHANGED) as disk:
        dirty = [e for e in disk.extents(CHANGED) if e.flags & wire.DIRTY]
        contents = list(disk.read_many((e.offset, e.length) for e in dirty))

    assert [(e.offset, e.length) for e in dirty] == [
        (8 * MIB, 65536), (20 * MIB, 4 * 65536), (40 * MIB, 65536),
    ]  # fmt: skip
    assert bytes(contents[0].content()) == b"\2" * 1024 + b"\1" * (65536 - 1024)
    assert contents[2].data is None


def test_reading_may_be_left_off_and_begun_again(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "32M", "write -P 1 0 16M", "write -P 2 16M 16M")
    with qemu_nbd(path) as place, client(place, wire.ALLOCATION) as disk:
        for piece in disk.read_many([(0, 32 * MIB)]):
            assert bytes(piece.content()[:1]) == b"\1"
            break
        assert list(disk.extents(wire.ALLOCATION)) == [Extent(0, 32 * MIB, 0)]
        assert disk.read(16 * MIB - 2, 4) == b"\1\1\2\2"
        with pytest.raises(ValueError, match="of 33554432"):
            disk.read(32 * MIB - 1, 2)


def test_a_missing_export_is_one_clear_line(tmp_path: Path) -> None:
    path = image(tmp_path / "a.qcow2", "1M")
    with qemu_nbd(path) as place, pytest.raises(HypervisorError) as caught:
        Client(place, "vdb", host="alpha")

    assert str(caught.value) == (
        f"alpha: disk vdb over NBD ({place}): refused by the server: no such export"
    )
    assert caught.value.host == "alpha"


def test_nobody_there_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    places: list[Place] = [
        Unix(str(tmp_path / "none")),
        Tcp("127.0.0.1", port),
        Unix(f"{tmp_path}/{'x' * 99}"),
    ]
    for place in places:
        with pytest.raises(HypervisorError, match="alpha: disk vda over NBD"):
            client(place)


def agree(sock: socket.socket, size: int = 8 * MIB, *, structured: bool = True) -> None:
    greet(sock)
    option = next_option(sock)
    reply(sock, option, wire.REP_ACK if structured else wire.REP_ERR_UNSUP)
    while (option := next_option(sock)) == wire.OPT_SET_META_CONTEXT:
        reply(sock, option, wire.REP_META_CONTEXT, struct.pack(">I", 7) + b"base:allocation")
        reply(sock, option, wire.REP_ACK)
    reply(sock, option, wire.REP_INFO, wire.EXPORT_INFO.pack(0, size, wire.HAS_FLAGS))
    reply(sock, option, wire.REP_ACK)


def chunk(kind: int, body: bytes, *, handle: int = 1, flags: int = wire.CHUNK_DONE) -> bytes:
    return wire.STRUCTURED.pack(wire.STRUCTURED_MAGIC, flags, kind, handle, len(body)) + body


def answering(*answers: bytes, structured: bool = True) -> Talk:
    def talk(sock: socket.socket) -> None:
        agree(sock, structured=structured)
        take(sock, wire.REQUEST.size)
        sock.sendall(b"".join(answers))
        while sock.recv(65536):
            pass

    return talk


def data(offset: int, content: bytes, **more: int) -> bytes:
    return chunk(wire.CHUNK_DATA, struct.pack(">Q", offset) + content, **more)


def status(*extents: tuple[int, int], number: int = 7) -> bytes:
    body = b"".join(wire.EXTENT.pack(*extent) for extent in extents)
    return chunk(wire.CHUNK_STATUS, struct.pack(">I", number) + body)


FULL = b"x" * 4096


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"", "closed the connection", id="silence"),
        pytest.param(b"\0" * 40, "an invalid magic number", id="zeros"),
        pytest.param(data(0, FULL, handle=9), "reply to an unknown request", id="handle"),
        pytest.param(data(0, FULL + b"x"), "not requested", id="too-long"),
        pytest.param(data(4096, FULL), "not requested", id="elsewhere"),
        pytest.param(data(0, FULL[:100]), "3996 bytes fewer", id="too-short"),
        pytest.param(data(0, b""), "chunk without data", id="empty"),
        pytest.param(data(0, FULL, flags=0) + data(0, FULL), "not requested", id="twice"),
        pytest.param(chunk(wire.CHUNK_HOLE, b"\0" * 12), "not requested", id="hole-of-0"),
        pytest.param(chunk(wire.CHUNK_HOLE, b"\0" * 13), "malformed hole", id="hole-form"),
        pytest.param(chunk(wire.CHUNK_NONE, b""), "4096 bytes fewer", id="nothing"),
        pytest.param(chunk(77, b""), "of type 77", id="kind"),
        pytest.param(status((4096, 0)), "of type 5", id="status-for-a-read"),
        pytest.param(
            chunk(wire.CHUNK_ERROR_PLAIN, b"\0" * 5),
            "error with an invalid length of 5 bytes", id="error",
        ),
        pytest.param(
            chunk(wire.CHUNK_ERROR_PLAIN, struct.pack(">IH", 5, 0)),
            "reading bytes 0 to 4096: Input/output error", id="eio",
        ),
        pytest.param(
            chunk(wire.CHUNK_ERROR_OFFSET, struct.pack(">IH4sQ", 5, 4, b"b\nd!", 0)),
            "reading bytes 0 to 4096: b d!", id="with-words",
        ),
        pytest.param(
            chunk(wire.CHUNK_ERROR | 999, struct.pack(">IH", 1 << 31, 65535)),
            "unknown error", id="error-of-the-future",
        ),
        pytest.param(
            wire.SIMPLE.pack(wire.SIMPLE_MAGIC, 0, 1), "simple reply instead of", id="simple"
        ),
        pytest.param(wire.SIMPLE.pack(wire.SIMPLE_MAGIC, 1, 1), "not permitted", id="simple-no"),
    ],
)  # fmt: skip
def test_a_wrong_answer_to_a_read_is_one_clear_line(
    tmp_path: Path, answer: bytes, why: str
) -> None:
    def talk(sock: socket.socket) -> None:
        agree(sock)
        take(sock, wire.REQUEST.size)
        sock.sendall(answer)

    with scripted(tmp_path, talk) as place, client(place) as disk:
        with pytest.raises(HypervisorError, match=why) as caught:
            disk.read(0, 4096)
        with pytest.raises(HypervisorError):
            disk.read(0, 4096)

    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("alpha: disk vda over NBD")


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(status(), "status with an invalid length of 4 bytes", id="none"),
        pytest.param(status((0, 0)), "with a length of 0", id="length-0"),
        pytest.param(status((4096, 0), number=8), "not requested", id="other-context"),
        pytest.param(
            chunk(wire.CHUNK_NONE, b""), "no block status for base:allocation", id="nothing"
        ),
        pytest.param(chunk(wire.CHUNK_STATUS, b"\0" * 13), "of 13 bytes", id="form"),
        pytest.param(data(0, FULL), "of type 1", id="data"),
        pytest.param(
            wire.STRUCTURED.pack(wire.STRUCTURED_MAGIC, 1, wire.CHUNK_STATUS, 1, (1 << 32) - 4),
            "of 4294967292 bytes", id="huge",
        ),
    ],
)  # fmt: skip
def test_a_wrong_word_on_the_blocks_is_one_clear_line(
    tmp_path: Path, answer: bytes, why: str
) -> None:
    with (
        scripted(tmp_path, answering(answer)) as place,
        client(place, wire.ALLOCATION) as disk,
        pytest.raises(HypervisorError, match=why),
    ):
        list(disk.extents(wire.ALLOCATION))


def test_a_word_on_more_than_was_asked_is_cut(tmp_path: Path) -> None:
    talk = answering(status((MIB, 0), ((1 << 32) - 512, 3)))
    with scripted(tmp_path, talk) as place, client(place, wire.ALLOCATION) as disk:
        found = list(disk.extents(wire.ALLOCATION))

    assert found == [Extent(0, MIB, 0), Extent(MIB, 7 * MIB, 3)]


def test_a_server_without_structured_replies_can_be_read(tmp_path: Path) -> None:
    answer = wire.SIMPLE.pack(wire.SIMPLE_MAGIC, 0, 1) + FULL
    with (
        scripted(tmp_path, answering(answer, structured=False)) as place,
        client(place, wire.ALLOCATION) as disk,
    ):
        assert dict(disk.contexts) == {}
        assert disk.read(0, 4096) == FULL


@settings(max_examples=100)
@given(
    said=st.lists(
        st.one_of(
            st.binary(max_size=64),
            st.builds(
                lambda kind, flags, handle, body: chunk(kind, body, flags=flags, handle=handle),
                st.sampled_from([0, 1, 2, 5, 0x8001, 0x8002, 3]), st.integers(0, 1),
                st.integers(1, 3), st.binary(max_size=40),
            ),
            st.builds(
                lambda at, length, flags: data(at, b"y" * length, flags=flags),
                st.integers(0, 8192), st.integers(0, 8192), st.integers(0, 1),
            ),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_whatever_a_server_says_is_data_or_one_error(said: list[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        thread = threading.Thread(target=lambda: _then_nonsense(theirs, said))
        thread.start()
        disk, lines = _over(ours), 1
        try:
            assert [piece.length for piece in disk.read_many([(0, 4096), (4096, 4096)])]
            assert sum(e.length for e in disk.extents(wire.ALLOCATION)) == disk.size
        except HypervisorError as exc:
            lines = len(str(exc).splitlines())
        finally:
            disk.close()
            thread.join()
    assert lines == 1


def _then_nonsense(sock: socket.socket, said: list[bytes]) -> None:
    try:
        agree(sock)
        for one in said:
            sock.sendall(one)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass
    except (OSError, wire.Gone):
        pass


def _over(connected: socket.socket) -> Client:
    connected.settimeout(5.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vmckpt.capture.nbd.client._connect", lambda *_: connected)
        return client(Unix("pair"), wire.ALLOCATION)
