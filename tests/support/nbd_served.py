"""A disk with data, a hole and data, served over NBD, and what is said to its server."""

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.capture.nbd.server import Server
from vmckpt.capture.nbd.session import Export
from vmckpt.units import MIB

SIZE = 24 * MIB + 512


CONTENT = random.Random(4).randbytes(2 * MIB) + bytes(20 * MIB) + b"\7" * (2 * MIB + 512)


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


def raw(server: Server) -> socket.socket:
    assert isinstance(server.place, Unix)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(5.0)
    made.connect(server.place.path)
    return made


def order(kind: int, offset: int, length: int, *, flags: int = 0) -> bytes:
    return wire.REQUEST.pack(wire.REQUEST_MAGIC, flags, kind, 5, offset, length)
