"""libvirt's save image: a header, the guest's XML, and QEMU's stream.

`virsh restore` reads these images. If the image is a FIFO, libvirt can start a guest from a stream
that is generated while QEMU reads it. No file on disk is needed.
"""

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from vmckpt.errors import StreamDamaged

MAGIC = b"LibvirtQemudSave"
# libvirt writes the final magic only once the file is complete.
_PARTIAL = b"LibvirtQemudPart"
# The format version since libvirt 0.9, which newer versions of libvirt still read and write.
_VERSION = 2
_RAW = 0
# Version, length of the texts, was running, compression, offset of the cookie; the rest is unused.
_FIELDS = struct.Struct("=5I56x")
HEADER = len(MAGIC) + _FIELDS.size
_LONGEST_TEXT = 16 << 20
_PIPE_SIZE = 1 << 20
_TURN = 0.005


def header(xml: str, *, running: bool, cookie: str = "") -> bytes:
    """Return the beginning of a save image, which QEMU's stream must follow.

    `running`: whether the guest was running when saved; `cookie`: libvirt's private data, if any.
    """
    texts = xml.encode() + b"\0"
    offset = len(texts) if cookie else 0
    if cookie:
        texts += cookie.encode() + b"\0"
    return MAGIC + _FIELDS.pack(_VERSION, len(texts), running, _RAW, offset) + texts


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHeader:
    """The contents of a save image before QEMU's stream."""

    xml: str
    cookie: str
    running: bool


def read_header(file: BinaryIO | FileIO) -> SaveHeader:
    """Read a save image up to the start of the stream. Raises StreamDamaged."""
    raw = _exactly(file, HEADER)
    magic, fields = raw[: len(MAGIC)], raw[len(MAGIC) :]
    if magic == _PARTIAL:
        raise _wrong("the file is incomplete")
    # Images of machines with another byte order are not supported.
    version, length, running, compression, offset = _FIELDS.unpack(fields)
    if magic != MAGIC or not 1 <= version <= 3:
        raise _wrong(f"unknown format {magic!r}, version {version}")
    if compression != _RAW:
        raise _wrong(f"compression method {compression} is not supported; the image must be raw")
    if not 0 < length <= _LONGEST_TEXT or offset >= length:
        raise _wrong(f"invalid header: {length} bytes of XML, cookie at {offset}")
    texts = _exactly(file, length)
    xml, cookie = (texts[:offset], texts[offset:]) if offset else (texts, b"")
    try:
        return SaveHeader(
            xml=xml.split(b"\0", 1)[0].decode(),
            cookie=cookie.split(b"\0", 1)[0].decode(),
            running=bool(running),
        )
    except UnicodeDecodeError:
        raise _wrong("its XML is not valid UTF-8") from None


def _exactly(file: BinaryIO | FileIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise _wrong("the file is truncated")
    return data


def _wrong(what: str) -> StreamDamaged:
    return StreamDamaged(f"libvirt's save image: {what}", hint="try again")


Fill = Callable[[int], None]
"""Writes the complete content to an open file."""


class Fifo:
    """A FIFO that is filled while it is read. Use as `with Fifo(folder, fill) as path`.

    `fill(file)` writes the complete content, in a thread. Newer versions of libvirt read only the
    header and then reopen the FIFO. `fill` is then called again, and must start from the
    beginning. Leaving the block waits for the thread, removes the FIFO, and raises the
    exception of `fill`, unless the block has raised another exception.
    """

    def __init__(self, folder: Path, fill: Fill) -> None:
        self._path = folder / "stream"
        self._fill = fill
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fill", daemon=True)
        self._error: Exception | None = None
        self.filled = False
        """Whether the complete content was written."""

    def __enter__(self) -> Path:
        os.mkfifo(self._path, 0o600)
        self._thread.start()
        return self._path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)
        if kind is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        while not self._left.is_set():
            file = self._opened()
            if file is None:
                continue
            try:
                self._fill(file)
                self.filled = True
                return
            except BrokenPipeError:
                continue
            except Exception as exc:  # noqa: BLE001 - raised in the waiting thread
                self._error = exc
                return
            finally:
                os.close(file)

    def _opened(self) -> int | None:
        """Open the writing end. Returns its descriptor; None if there is no reader yet.

        Once the writing end is open, a new FIFO replaces the path. So a second reader does not read
        the rest of the old FIFO.
        """
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                raise
            self._left.wait(_TURN)
            return None
        following = self._path.with_suffix(".new")
        os.mkfifo(following, 0o600)
        following.rename(self._path)
        os.set_blocking(file, True)
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        return file
