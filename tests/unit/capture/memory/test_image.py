"""The frozen image, libvirt's save image, and the FIFO that feeds a restore."""

import errno
import io
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.images import write_stream
from tests.support.streams import NAMES, parsed, recorded
from vmckpt.capture.memory import image as images
from vmckpt.capture.memory.image import FrozenImage, ImageWriter
from vmckpt.capture.qemu_stream import save_image
from vmckpt.capture.qemu_stream.header import PAGE, Head, RamBlock
from vmckpt.capture.qemu_stream.stream import StreamParser
from vmckpt.errors import CaptureFailed, StreamDamaged

HEAD = Head(
    machine="pc", section=3, instance=0, version=4, footers=True,
    blocks=(RamBlock("pc.ram", 300 * PAGE), RamBlock("rom", 2 * PAGE)),
)  # fmt: skip


def addresses(*numbers: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    return np.array([number * PAGE for number in numbers], dtype=np.uint64)


def pages(*fillings: int) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    return np.repeat(np.array(fillings, dtype=np.uint8)[:, None], PAGE, axis=1)


def frozen(folder: Path, name: str = "background-7.2") -> FrozenImage:
    writer = ImageWriter(folder)
    parser = StreamParser(writer)
    parser.feed(recorded(name))
    parser.finish()
    return writer.finish()


@pytest.mark.parametrize("name", NAMES)
def test_an_image_holds_what_was_in_the_stream(tmp_path: Path, name: str) -> None:
    got, made = parsed(recorded(name)), frozen(tmp_path / "image", name)

    assert made.head == got.head
    assert made.tail() == got.tail_bytes
    for index, block in enumerate(made.blocks):
        assert made.file(index).read_bytes() == bytes(got.memory[block.name])
        assert (made.present(index) == got.present(block.name)).all()


def test_only_we_may_read_it_and_it_is_removed_whole(tmp_path: Path) -> None:
    made = frozen(tmp_path / "image")
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "image").glob("ram-?")}

    assert (tmp_path / "image").stat().st_mode & 0o077 == 0
    assert modes == {0}
    assert made.file(0).stat().st_blocks * 512 < made.blocks[0].size / 4
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_runs_in_any_order_and_pages_that_come_twice(tmp_path: Path) -> None:
    writer = ImageWriter(tmp_path / "image")
    writer.begin(HEAD)
    writer.pages(0, addresses(7, 8, 9, 3, 299), pages(1, 2, 3, 4, 5))
    writer.pages(0, addresses(8), pages(9))
    writer.zeros(0, addresses(3, 4))
    writer.tail(memoryview(b"\x04devices\0\x06\0\0\0\x02{}"))
    made = writer.finish()

    data = np.fromfile(made.file(0), dtype=np.uint8).reshape(-1, PAGE)
    assert {n: int(data[n, 0]) for n in np.flatnonzero(data.any(axis=1))} == {
        7: 1,
        8: 9,
        9: 3,
        299: 5,
    }
    assert np.flatnonzero(made.present(0)).tolist() == [7, 8, 9, 299]
    assert (writer.done, writer.total) == (8 * PAGE, 302 * PAGE)


def test_an_image_that_is_not_complete_is_none(tmp_path: Path) -> None:
    writer = ImageWriter(tmp_path / "image")
    writer.begin(HEAD)
    writer.close()
    with pytest.raises(CaptureFailed, match="is no complete image"):
        FrozenImage.open(tmp_path / "image")

    made = frozen(tmp_path / "other")
    os.truncate(made.file(0), PAGE)
    with pytest.raises(CaptureFailed, match="is not as its head says"):
        FrozenImage.open(tmp_path / "other")


@pytest.mark.parametrize("cut", [1, 100, 50000, 75000, 100000])
def test_device_state_that_is_cut_off_makes_no_image(tmp_path: Path, cut: int) -> None:
    writer = ImageWriter(tmp_path / "image")
    parser = StreamParser(writer)
    parser.feed(recorded("background-7.2")[:-cut])
    parser.finish()

    with pytest.raises(StreamDamaged, match="bytes of device state are not whole"):
        writer.finish()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        ImageWriter(tmp_path)
    with pytest.raises(CaptureFailed, match="an image without memory"):
        ImageWriter(tmp_path / "image").finish()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        images.write_all(file.fileno(), memoryview(bytes(range(250)) * 20), 7)

    assert (tmp_path / "file").read_bytes() == bytes(7) + bytes(range(250)) * 20


def test_a_save_image_begins_as_libvirt_wants_it() -> None:
    made = save_image.header("<domain/>", running=True, cookie="<cookie/>")

    assert made[:16] == b"LibvirtQemudSave"
    assert len(made) == 92 + 10 + 10
    got = save_image.read_header(io.BytesIO(made + b"QEVM"))
    assert (got.xml, got.cookie, got.running) == ("<domain/>", "<cookie/>", True)
    plain = save_image.read_header(io.BytesIO(save_image.header("<d/>", running=False)))
    assert (plain.xml, plain.cookie, plain.running) == ("<d/>", "", False)


HEADER = save_image.header("<domain/>", running=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it ends too early"),
        (HEADER[:95], "it ends too early"),
        (HEADER.replace(b"Save", b"Part"), "it was never completed"),
        (b"QEVM" + bytes(200), "no save image that is known here"),
        (HEADER[:16] + b"\x09" + HEADER[17:], "version 9"),
        (HEADER[:28] + b"\x02" + HEADER[29:], "compressed by method 2"),
        (HEADER[:20] + b"\xff\xff\xff\xff" + HEADER[24:], "4294967295 bytes of XML"),
        (HEADER[:32] + b"\x0a" + HEADER[33:], "bytes of XML"),
        (HEADER[:92] + b"\xff" * 10, "its XML is no text"),
    ],
)
def test_what_is_no_save_image_is_told(data: bytes, message: str) -> None:
    with pytest.raises(StreamDamaged) as caught:
        save_image.read_header(io.BytesIO(data))

    assert message in caught.value.message


@pytest.mark.parametrize("name", NAMES)
def test_an_image_becomes_a_stream_again(tmp_path: Path, name: str) -> None:
    made, first, out = frozen(tmp_path / "image", name), parsed(recorded(name)), bytearray()
    write_stream(made, out.extend)
    again = parsed(bytes(out))

    assert again.memory == first.memory
    assert again.tail_bytes == first.tail_bytes
    # Firmware's zero pages are told; those of main memory are there already.
    assert len(again.seen["pc.bios"]) == 64
    assert len(again.seen["pc.ram"]) == first.present("pc.ram").sum()


def fill(data: bytes) -> "tuple[list[int], save_image.Fill]":
    calls: list[int] = []

    def write(file: int) -> None:
        calls.append(file)
        images.write_all(file, memoryview(data), None)

    return calls, write


def test_a_fifo_gives_all_of_it(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20000
    calls, write = fill(data)
    with save_image.Fifo(tmp_path, write) as path:
        assert path.read_bytes() == data

    assert (len(calls), list(tmp_path.iterdir())) == (1, [])


def test_a_reader_that_only_looked_may_come_again(tmp_path: Path) -> None:
    data = bytes(range(256)) * 20000
    calls, write = fill(data)
    fifo = save_image.Fifo(tmp_path, write)
    with fifo as path:
        with path.open("rb", buffering=0) as looking:
            assert looking.read(92) == data[:92]
        assert path.read_bytes() == data

    assert (len(calls), fifo.filled) == (2, True)


def test_a_fifo_that_nobody_reads_ends_with_the_block(tmp_path: Path) -> None:
    calls, write = fill(b"data")
    before = threading.active_count()
    with (
        pytest.raises(RuntimeError, match="libvirt said no"),
        save_image.Fifo(tmp_path, write),
    ):
        raise RuntimeError("libvirt said no")

    assert (calls, list(tmp_path.iterdir()), threading.active_count()) == ([], [], before)


def test_what_goes_wrong_in_filling_is_raised(tmp_path: Path) -> None:
    def write(_file: int) -> None:
        raise OSError(errno.EIO, "the store is gone")

    with (
        pytest.raises(OSError, match="the store is gone"),
        save_image.Fifo(tmp_path, write) as path,
    ):
        assert path.read_bytes() == b""
