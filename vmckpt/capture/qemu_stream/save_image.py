"""libvirt's save image: a header, the guest's XML, and QEMU's stream.

`virsh restore` reads it. Written into a FIFO it lets libvirt start a guest from a stream that is
made while QEMU reads it, so nothing is laid down on a disk.
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
# libvirt gives a file its name only when it is complete.
_PARTIAL = b"LibvirtQemudPart"
# Since libvirt 0.9; newer ones read it and still write it.
_VERSION = 2
_RAW = 0
# version, length of the texts, was running, compression, offset of the cookie; the rest is free.
_FIELDS = struct.Struct("=5I56x")
HEADER = len(MAGIC) + _FIELDS.size
_LONGEST_TEXT = 16 << 20
_PIPE_SIZE = 1 << 20
_TURN = 0.005


def header(xml: str, *, running: bool, cookie: str = "") -> bytes:
    """The beginning of a save image; QEMU's stream follows.

    `cookie` is libvirt's own note on the guest, if one was kept.
    """
    texts = xml.encode() + b"\0"
    offset = len(texts) if cookie else 0
    if cookie:
        texts += cookie.encode() + b"\0"
    return MAGIC + _FIELDS.pack(_VERSION, len(texts), running, _RAW, offset) + texts


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHeader:
    """What a save image says before its stream."""

    xml: str
    cookie: str
    running: bool


def read_header(file: BinaryIO | FileIO) -> SaveHeader:
    """Read up to where the stream begins. Raises StreamDamaged."""
    raw = _exactly(file, HEADER)
    magic, fields = raw[: len(MAGIC)], raw[len(MAGIC) :]
    if magic == _PARTIAL:
        raise _wrong("it was never completed")
    # An image from a machine of the other byte order is not ours to read.
    version, length, running, compression, offset = _FIELDS.unpack(fields)
    if magic != MAGIC or not 1 <= version <= 3:
        raise _wrong(f"{magic!r}, version {version}: no save image that is known here")
    if compression != _RAW:
        raise _wrong(f"compressed by method {compression}, and must be raw")
    if not 0 < length <= _LONGEST_TEXT or offset >= length:
        raise _wrong(f"{length} bytes of XML")
    texts = _exactly(file, length)
    xml, cookie = (texts[:offset], texts[offset:]) if offset else (texts, b"")
    try:
        return SaveHeader(
            xml=xml.split(b"\0", 1)[0].decode(),
            cookie=cookie.split(b"\0", 1)[0].decode(),
            running=bool(running),
        )
    except UnicodeDecodeError:
        raise _wrong("its XML is no text") from None


def _exactly(file: BinaryIO | FileIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise _wrong("it ends too early")
    return data


def _wrong(what: str) -> StreamDamaged:
    return StreamDamaged(f"libvirt's save image: {what}", hint="capture the guest again")


Fill = Callable[[int], None]
"""Writes all of it into an open file."""


class Fifo:
    """A FIFO that is filled while somebody reads it. Use as `with Fifo(folder, fill) as path`.

    `fill(file)` writes all of it, in a thread; it is called again from the beginning if the reader
    only looked at the header and opens it once more, as newer libvirts do. When the block is left
    the thread has ended, the FIFO is gone, and what `fill` raised is raised, unless the block did.
    """

    def __init__(self, folder: Path, fill: Fill) -> None:
        self._path = folder / "stream"
        self._fill = fill
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fill", daemon=True)
        self._error: Exception | None = None
        self.filled = False
        """Whether all of it was taken."""

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
            except Exception as exc:  # noqa: BLE001 - handed to whoever waits
                self._error = exc
                return
            finally:
                os.close(file)

    def _opened(self) -> int | None:
        """The writing end, once somebody reads; None if nobody does yet.

        Whoever opens it the next time gets another FIFO, and not the rest of this one.
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
