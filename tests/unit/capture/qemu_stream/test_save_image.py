"""libvirt's save image, and the FIFO that feeds a restore."""

import errno
import io
import threading
from pathlib import Path

import pytest

from vmckpt.capture.memory import image as images
from vmckpt.capture.qemu_stream import save_image
from vmckpt.errors import StreamDamaged


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
        (b"", "the file is truncated"),
        (HEADER[:95], "the file is truncated"),
        (HEADER.replace(b"Save", b"Part"), "the file is incomplete"),
        (b"QEVM" + bytes(200), "unknown format"),
        (HEADER[:16] + b"\x09" + HEADER[17:], "version 9"),
        (HEADER[:28] + b"\x02" + HEADER[29:], "compression method 2 is not supported"),
        (HEADER[:20] + b"\xff\xff\xff\xff" + HEADER[24:], "4294967295 bytes of XML, cookie at "),
        (HEADER[:32] + b"\x0a" + HEADER[33:], "invalid header: "),
        (HEADER[:92] + b"\xff" * 10, "its XML is not valid UTF-8"),
    ],
)
def test_what_is_no_save_image_is_told(data: bytes, message: str) -> None:
    with pytest.raises(StreamDamaged) as caught:
        save_image.read_header(io.BytesIO(data))

    assert message in caught.value.message


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
