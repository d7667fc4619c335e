"""Two agents' ends of a real line, a guest's memory and disks as files, and a QEMU that is none."""

import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.staging import in_memory, pieces_of
from vmckpt.capture.memory.memory_files import MemoryFile
from vmckpt.capture.memory.page_diff import Mapping
from vmckpt.capture.nbd.client import Piece
from vmckpt.capture.qemu_stream.header import PAGE
from vmckpt.errors import HypervisorError
from vmckpt.replication.disks import write_log
from vmckpt.replication.disks.epoch_log import LogPlace, WriteLog
from vmckpt.replication.disks.log_control import Control
from vmckpt.replication.protocol import connection
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.session import Disk, Lease, ProtectionTerms, Session
from vmckpt.units import Seconds

SHORT = Seconds(5.0)
SESSION = "5e55"


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 5.0
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def session(**changes: Any) -> Session:
    """The primary's end, with one disk and without a lease."""
    told: dict[str, Any] = {
        "role": "primary", "session": SESSION, "guest": "0d6f7a57-be04-4dd1-80ff-c8e5fa28580b",
        "name": "web1", "host": "alpha", "peer": "beta", "uri": "qemu:///system",
        "terms": ProtectionTerms(interval=Seconds(0.02), automatic=False), "lease": None,
        "disks": (Disk(target="vda", size=4096, path="/srv/web1.qcow2", format="qcow2"),),
        "address": "127.0.0.1", "port": 0, "owner": (os.getuid(), os.getgid()),
        "extra": {"nodes": {"vda": "node0"}, "sockets": ["/run/disk0.sock"]},
    }  # fmt: skip
    return Session(**{**told, **changes})


LEASE = Lease(
    url="postgresql://u:secret@witness/vmckpt", ttl=Seconds(1.0), margin=Seconds(0.2)
)  # fmt: skip


class Ends:
    """Folders of the primary's and the backup's agent, which know each other; the backup listens.

    Closed, it refuses connections, until it listens again.
    """

    def __init__(self, folder: Path) -> None:
        self.primary, self.backup = folder / "primary", folder / "backup"
        both = (self.primary, self.backup)
        for one in both:
            one.mkdir()
        told = [connection.make_identity(one) for one in both]
        for one, other in zip(both, reversed(told), strict=True):
            (one / connection.PEER).write_text(other)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.server.getsockname()[1]

    def close(self) -> None:
        self.server.close()

    def listen(self) -> None:
        self.server = socket.create_server(("127.0.0.1", self.port))

    def connect(self) -> ssl.SSLSocket:
        return connection.connect(self.primary, ("127.0.0.1", self.port), limit=SHORT)

    def accept(self, limit: Seconds = SHORT) -> ssl.SSLSocket | None:
        return connection.accept(self.backup, self.server, limit=limit)

    def lines(self, stack: ExitStack) -> tuple[PeerConnection, PeerConnection]:
        """The primary's end and the backup's."""
        found: list[ssl.SSLSocket | None] = []
        waiter = threading.Thread(target=lambda: found.append(self.accept()))
        waiter.start()
        near = self.connect()
        waiter.join()
        assert found[0] is not None
        return (
            stack.enter_context(PeerConnection(near, lambda: 1)),
            stack.enter_context(PeerConnection(found[0], lambda: 1)),
        )


@contextmanager
def two_ends() -> Iterator[Ends]:
    with in_memory() as folder:
        made = Ends(folder)
        try:
            yield made
        finally:
            made.close()


def mapped(path: Path, pages: int, stack: ExitStack) -> Mapping:
    """A file of so many pages, to be written."""
    opened = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(opened, pages * PAGE)
        return stack.enter_context(Mapping(opened, pages * PAGE, write=True))
    finally:
        os.close(opened)


class GuestMemory:
    """What the guest writes to: files as QEMU has them."""

    def __init__(self, folder: Path, sizes: Sequence[int], stack: ExitStack) -> None:
        """`sizes`: in pages."""
        paths = [folder / f"ram{number}" for number in range(len(sizes))]
        self.mapped = [mapped(path, size, stack) for path, size in zip(paths, sizes, strict=True)]
        self.files = [
            MemoryFile((path.name,), size * PAGE, path)
            for path, size in zip(paths, sizes, strict=True)
        ]

    def write(self, file: int, number: int, value: int) -> None:
        self.mapped[file].pages[number, value % 512] = value

    def content(self) -> list[bytes]:
        return [one.pages.tobytes() for one in self.mapped]


class GuestDisk:
    """A disk whose writes come to a log, as its nbdkit would write it."""

    def __init__(self, folder: Path, disk: int, size: int, stack: ExitStack) -> None:
        self.place = LogPlace(folder=folder, disk=disk)
        Control.create(self.place.control)
        self.place.log.touch()
        self.control = stack.enter_context(Control(self.place.control))
        self.log = stack.enter_context(WriteLog(self.place))
        # As its nbdkit, until its input ends.
        words = ["sh", "-c", "read end", f"log={self.place.log}"]
        serves = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE))
        self.control.process = serves.pid
        self.content = bytearray(size)

    def write(self, offset: int, data: bytes) -> None:
        self._append(write_log.header(offset, len(data)) + data)
        self.content[offset : offset + len(data)] = data

    @property
    def size(self) -> int:
        return len(self.content)

    def read_many(self, pieces: Iterable[tuple[int, int]], /) -> Iterator[Piece]:
        return pieces_of(self.content, pieces)

    def trim(self, offset: int, length: int) -> None:
        self._append(write_log.header(offset, length, write_log.TRIM))
        self.content[offset : offset + length] = bytes(length)

    def _append(self, record: bytes) -> None:
        with self.place.log.open("r+b") as log:
            log.seek(self.control.written)
            log.write(record)
        self.control.written += len(record)


class Qemu:
    """A monitor that notes what it is told. `fails` maps a command to what it raises, once."""

    host, guest, uri, name = "alpha", session().guest, "qemu:///system", "web1"

    def __init__(self, events: list[str] | None = None) -> None:
        self.events = [] if events is None else events
        self.state = "running"
        self.migration: dict[str, Any] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.nodes: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.gone = False

    def mirror(self, name: str, *, ready: bool = True) -> None:
        self.jobs[name] = {
            "device": name, "ready": ready, "io-status": "ok", "status": "ready",
            "offset": 0, "len": 0,
        }  # fmt: skip

    def ask(self, command: str, **arguments: object) -> Any:
        del arguments
        match command:
            case "query-migrate":
                return self.migration
            case "query-block-jobs":
                return list(self.jobs.values())
            case "query-named-block-nodes":
                return [{"node-name": name} for name in self.nodes]
            case _:
                raise AssertionError(command)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        del files
        self.events.append(command)
        if command in self.fails:
            raise self.fails.pop(command)
        match command:
            case "stop" | "cont":
                self.state = "paused" if command == "stop" else "running"
            case "blockdev-add":
                self.nodes.append(arguments["node-name"])
            case "blockdev-mirror":
                self.mirror(arguments["job-id"])
                self.jobs[arguments["job-id"]]["sync"] = arguments["sync"]
            case "blockdev-del":
                self.nodes.remove(arguments["node-name"])
            case "block-job-cancel":
                self.jobs.pop(arguments["device"])
            case _:
                pass

    def run_state(self) -> str:
        if self.gone:
            raise HypervisorError("the guest has no QEMU", host=self.host)
        return self.state

    def paused_by_user(self) -> bool:
        return False


def same(memory: Sequence[Any], guest: GuestMemory) -> bool:
    """Whether a standby's memory is the guest's."""
    return all(
        np.array_equal(one.pages, other.pages)
        for one, other in zip(memory, guest.mapped, strict=True)
    )
