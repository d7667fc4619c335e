"""The frozen image of a guest's memory and device state."""

import os
from pathlib import Path

import numpy as np
import pytest

from tests.support.images import write_stream
from tests.support.streams import NAMES, frozen, parsed, recorded
from vmckpt.capture.memory import image as images
from vmckpt.capture.memory.image import FrozenImage, ImageWriter
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
    with pytest.raises(CaptureFailed, match="is not a complete image"):
        FrozenImage.open(tmp_path / "image")

    made = frozen(tmp_path / "other")
    os.truncate(made.file(0), PAGE)
    with pytest.raises(CaptureFailed, match="do not match the stream's header"):
        FrozenImage.open(tmp_path / "other")


@pytest.mark.parametrize("cut", [1, 100, 50000, 75000, 100000])
def test_device_state_that_is_cut_off_makes_no_image(tmp_path: Path, cut: int) -> None:
    writer = ImageWriter(tmp_path / "image")
    parser = StreamParser(writer)
    parser.feed(recorded("background-7.2")[:-cut])
    parser.finish()

    with pytest.raises(StreamDamaged, match=r"the device state is incomplete \(\d+ bytes\)"):
        writer.finish()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        ImageWriter(tmp_path)
    with pytest.raises(CaptureFailed, match="stream contains no memory"):
        ImageWriter(tmp_path / "image").finish()


def test_a_short_write_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    with (tmp_path / "file").open("wb", buffering=0) as file:
        images.write_all(file.fileno(), memoryview(bytes(range(250)) * 20), 7)

    assert (tmp_path / "file").read_bytes() == bytes(7) + bytes(range(250)) * 20


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
