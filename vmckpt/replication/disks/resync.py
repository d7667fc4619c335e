"""Synchronise a standby's disks. Pieces that are equal on both sides are not sent.

The guest keeps writing meanwhile, and its writes are logged. Once a piece was read, it must be sent
before any more of the log: what the log still contains is newer, or is already in the piece.

The running guest's own QEMU serves the disks. QEMU has only one NBD server. A socket in one of
vmckpt's directories marks the server as vmckpt's. So if an agent dies, the next agent can stop this
server, but no other server.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from vmckpt.capture.migration_settings import Commands
from vmckpt.capture.nbd.client import Client, Piece
from vmckpt.capture.nbd.protocol import Unix
from vmckpt.hypervisor import qemu_user
from vmckpt.hypervisor.qmp import QmpRefused
from vmckpt.replication.disks import write_log
from vmckpt.replication.primary.sender import Sender
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import Digests, PageRequest
from vmckpt.units import MIB, Bytes, Seconds

PIECE = 64 << 10
"""Number of bytes that are compared and sent as a unit."""
_ASKED = 256
"""Number of pieces per request for digests: 16 MiB, so that no log waits for long."""
_READ = MIB
_BATCH = 4 * MIB
_ANSWER = Seconds(30.0)
_DIGEST = 8
"""Length of a digest in bytes, as for pages of memory: see `page_codec.digests`."""


class Readable(Protocol):
    """A disk that can be read, for example a `capture.nbd.client.Client`."""

    @property
    def size(self) -> int:
        """Size of the disk, in bytes."""
        ...

    def read_many(self, pieces: Iterable[tuple[int, int]], /) -> Iterator[Piece]:
        """Read pieces given as (offset, length), in that order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the synchronisation, over all disks."""

    compared: Bytes
    sent: Bytes
    """Total size of the pieces that differed, before compression."""
    whole: Bytes
    """Total size of all disks."""


@dataclass(frozen=True, slots=True)
class _Content:
    """A piece of a disk."""

    offset: int
    length: int
    data: memoryview | None
    """The content; None: all zeros, as reported by the server."""

    def digest(self) -> bytes:
        return _zeros(self.length) if self.data is None else _short(self.data)

    def record(self, digest: bytes) -> list[write_log.Buffer]:
        """Return the record that copies this piece to the other disk."""
        if self.data is None or digest == _zeros(self.length):
            return [write_log.header(self.offset, self.length, write_log.ZEROS)]
        return [write_log.header(self.offset, self.length), self.data]


def bring(line: PeerConnection, sender: Sender, disks: Sequence[Readable]) -> Iterator[Progress]:
    """Make the backup's disks equal to `disks`, except for writes that are still in the logs.

    Yields the progress after each step. Logging of the guest's writes must start before this call.
    The caller must send the logs between two steps, and at no other time. Raises ConnectionLost,
    WireError, and any error of the disks.
    """
    whole = sum(disk.size for disk in disks)
    compared = sent = 0
    for number, disk in enumerate(disks):
        for first in range(0, _count(disk), _ASKED):
            count = min(_ASKED, _count(disk) - first)
            line.send(PageRequest(file=-1 - number, first=first, count=count))
            ours = list(_contents(disk, first, count))  # while the backup reads its disk
            told = line.expect(Digests, _ANSWER)
            if (told.file, told.first, len(told.data)) != (-1 - number, first, count * _DIGEST):
                told = Digests(file=-1 - number, first=first, data=b"")
            for records, much in _differences(ours, told.data):
                sender.bulk(number, records)
                sent += much
            compared += sum(one.length for one in ours)
            yield Progress(compared=Bytes(compared), sent=Bytes(sent), whole=Bytes(whole))


def answer(wanted: PageRequest, disks: Sequence[Readable]) -> Digests:
    """Return the backup's answer to a request for digests of a disk.

    Raises IndexError, ValueError if the request is invalid, and any error of the disks.
    """
    disk = disks[-1 - wanted.file]
    if wanted.count > _ASKED or wanted.first + wanted.count > _count(disk):
        raise ValueError(f"invalid request for {wanted.count} pieces from piece {wanted.first}")
    found = [one.digest() for one in _contents(disk, wanted.first, wanted.count)]
    return Digests(file=wanted.file, first=wanted.first, data=b"".join(found))


def _differences(ours: Sequence[_Content], theirs: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield batches of records for the pieces that differ, and the size of each batch's pieces.

    `theirs`: digests of the backup's pieces; empty: unknown.
    """
    batch: list[write_log.Buffer] = []
    much = 0
    for at, one in enumerate(ours):
        digest = one.digest()
        if digest == theirs[at * _DIGEST : (at + 1) * _DIGEST]:
            continue
        batch += one.record(digest)
        much += one.length
        if much >= _BATCH:
            yield b"".join(batch), much
            batch, much = [], 0
    if batch:
        yield b"".join(batch), much


def _contents(disk: Readable, first: int, count: int) -> Iterator[_Content]:
    begin, end = first * PIECE, min((first + count) * PIECE, disk.size)
    asked = [(at, min(_READ, end - at)) for at in range(begin, end, _READ)]
    for told in disk.read_many(asked):
        for at in range(0, told.length, PIECE):
            length = min(PIECE, told.length - at)
            data = None if told.data is None else told.data[at : at + length]
            yield _Content(told.offset + at, length, data)


def _count(disk: Readable) -> int:
    return -(-disk.size // PIECE)


def _short(data: write_log.Buffer) -> bytes:
    return blake3(data).digest(_DIGEST)


@cache
def _zeros(length: int) -> bytes:
    return _short(bytes(length))


_SOCKET = "disks.sock"
_EXPORT = "vmckpt-read-"


def place_of(folder: Path) -> Path:
    """Return the directory of the socket on which a guest's disks are served.

    `folder`: the guest's directory.
    """
    return folder / "read"


@contextmanager
def opened(
    monitor: Commands, nodes: Sequence[str], place: Path, owner: tuple[int, int]
) -> Iterator[list[Client]]:
    """Open block nodes of the running guest for reading, and yield a client for each, in order.

    `place`: directory for the socket, see `place_of`. `owner`: user and group IDs of QEMU. Raises
    ConnectionLost if QEMU's NBD server is already in use, HypervisorError, BadInput, OSError.
    """
    end(monitor, place)
    qemu_user.make_folder(place, owner)
    socket = place / _SOCKET
    try:
        address = {"type": "unix", "data": {"path": str(socket)}}
        try:
            monitor.tell("nbd-server-start", {"addr": address})
        except QmpRefused as exc:
            raise ConnectionLost(f"{monitor.name}'s disks cannot be read: {exc.message}") from exc
        with ExitStack() as stack:
            clients = []
            for number, node in enumerate(nodes):
                name = f"{_EXPORT}{number}"
                told: dict[str, object] = {"type": "nbd", "id": name, "name": name}
                monitor.tell("block-export-add", told | {"node-name": node, "writable": False})
                client = Client(Unix(str(socket)), name, host=monitor.host)
                clients.append(stack.enter_context(client))
            yield clients
    finally:
        end(monitor, place)


def end(monitor: Commands, place: Path) -> None:
    """Stop serving the guest's disks; does nothing if none is served. Raises HypervisorError."""
    if (place / _SOCKET).exists():
        with suppress(QmpRefused):  # the server is already stopped
            monitor.tell("nbd-server-stop", {})
    shutil.rmtree(place, ignore_errors=True)
