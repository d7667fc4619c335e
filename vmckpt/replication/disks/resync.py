"""Bring a standby's disks up to date: pieces that are the same on both sides are not sent.

The guest writes meanwhile, and all that it writes goes to its disk's log. A piece that was read
must be on its way before anything of that log is: what the log still has is newer, or the same.

The running guest's own QEMU serves its disks for that. QEMU has one NBD server; a socket in a
directory of ours shows that it is ours, so that after an agent's death the next one can remove it,
and no other.
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
"""Bytes that are compared, and sent, as one."""
_ASKED = 256
"""Pieces whose digests are asked for at once: 16 MiB, so that no log waits for long."""
_READ = MIB
_BATCH = 4 * MIB
_ANSWER = Seconds(30.0)
_DIGEST = 8
"""As for pages of memory: see page_codec.digests."""


class Readable(Protocol):
    """A disk as it is now; `capture.nbd.client.Client` is one."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read_many(self, pieces: Iterable[tuple[int, int]], /) -> Iterator[Piece]:
        """Read these (offset, length) and give them in that order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far it is, over all disks."""

    compared: Bytes
    sent: Bytes
    """Of pieces that differed, before they are packed."""
    whole: Bytes


@dataclass(frozen=True, slots=True)
class _Content:
    """A piece of a disk."""

    offset: int
    length: int
    data: memoryview | None
    """None: all zeros, and the server said so."""

    def digest(self) -> bytes:
        return _zeros(self.length) if self.data is None else _short(self.data)

    def record(self, digest: bytes) -> list[write_log.Buffer]:
        """What makes another disk the same there."""
        if self.data is None or digest == _zeros(self.length):
            return [write_log.header(self.offset, self.length, write_log.ZEROS)]
        return [write_log.header(self.offset, self.length), self.data]


def bring(line: PeerConnection, sender: Sender, disks: Sequence[Readable]) -> Iterator[Progress]:
    """Make the backup's disks what these are, but for what is in their logs meanwhile.

    All that the guest writes must come to the logs before this begins. Those are to be emptied
    between two steps of it, and at no other time. Raises ConnectionLost, WireError, and what the
    disks raise.
    """
    whole = sum(disk.size for disk in disks)
    compared = sent = 0
    for number, disk in enumerate(disks):
        for first in range(0, _count(disk), _ASKED):
            count = min(_ASKED, _count(disk) - first)
            line.send(PageRequest(file=-1 - number, first=first, count=count))
            ours = list(_contents(disk, first, count))  # while they read theirs
            told = line.expect(Digests, _ANSWER)
            if (told.file, told.first, len(told.data)) != (-1 - number, first, count * _DIGEST):
                told = Digests(file=-1 - number, first=first, data=b"")
            for records, much in _differences(ours, told.data):
                sender.bulk(number, records)
                sent += much
            compared += sum(one.length for one in ours)
            yield Progress(compared=Bytes(compared), sent=Bytes(sent), whole=Bytes(whole))


def answer(wanted: PageRequest, disks: Sequence[Readable]) -> Digests:
    """The backup's answer. Raises IndexError, ValueError: the question makes no sense; and what
    the disks raise."""
    disk = disks[-1 - wanted.file]
    if wanted.count > _ASKED or wanted.first + wanted.count > _count(disk):
        raise ValueError(f"nobody has {wanted.count} pieces of a disk from {wanted.first} on")
    found = [one.digest() for one in _contents(disk, wanted.first, wanted.count)]
    return Digests(file=wanted.file, first=wanted.first, data=b"".join(found))


def _differences(ours: Sequence[_Content], theirs: bytes) -> Iterator[tuple[bytes, int]]:
    """Records of the pieces that are not the same, some at a time, and bytes of disk in them.

    `theirs`: their digests; empty: not known.
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
    """Where the socket of a guest's disks is, of which `folder` has all files."""
    return folder / "read"


@contextmanager
def opened(
    monitor: Commands, nodes: Sequence[str], place: Path, owner: tuple[int, int]
) -> Iterator[list[Client]]:
    """Read these nodes, in that order; QEMU runs as `owner`.

    Raises ConnectionLost if another process reads the guest's disks now, and HypervisorError.
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
    """Nobody reads them any more; fine if nobody did. Raises HypervisorError."""
    if (place / _SOCKET).exists():
        with suppress(QmpRefused):  # it is gone already
            monitor.tell("nbd-server-stop", {})
    shutil.rmtree(place, ignore_errors=True)
