"""A disk's write log with a real nbdkit, and a guest that writes to it."""

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from vmckpt.capture.nbd.protocol import Unix
from vmckpt.errors import HypervisorError
from vmckpt.replication.backup.standby import NbdWriter
from vmckpt.replication.disks import nbdkit_server, write_log
from vmckpt.replication.disks.epoch_log import LogPlace, WriteLog
from vmckpt.replication.disks.write_log import Record
from vmckpt.units import MIB, Bytes

SIZE = 64 * MIB + 512
LIMIT = 2 * MIB
CONTENT = random.Random(5).randbytes(3 * MIB)


@dataclass
class Served:
    place: LogPlace
    socket: nbdkit_server.Socket
    opened: list[WriteLog] = field(default_factory=list)

    def start(self) -> int:
        return nbdkit_server.start(self.place, self.socket, size=Bytes(SIZE), limit=Bytes(LIMIT))

    def log(self) -> WriteLog:
        self.opened.append(WriteLog(self.place))
        return self.opened[-1]

    def guest(self) -> NbdWriter:
        """Who connects as QEMU does."""
        return NbdWriter(Unix(str(self.socket.path)), "", host="here")


@contextmanager
def serving() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as undo:
        place = LogPlace(folder=Path(folder) / "private", disk=0)
        made = Served(place, nbdkit_server.Socket(path=Path(folder) / "open" / "disk0.sock"))
        undo.callback(nbdkit_server.stop, place, made.socket)
        made.start()
        yield made
        for log in made.opened:
            log.close()


def records(log: WriteLog, first: int | None = None, end: int | None = None) -> list[Record]:
    pieces = log.read(log.consumed if first is None else first, log.size() if end is None else end)
    return [record for piece in pieces for record in write_log.records(piece)]


def until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10.0
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""
    return False


def room(place: LogPlace) -> int:
    """Bytes that the log takes."""
    return place.log.stat().st_blocks * 512


class Pushing:
    """A guest that writes until something holds it."""

    def __init__(self, served: Served, much: int) -> None:
        self.error: HypervisorError | None = None
        self._served, self._much = served, much
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        with suppress(HypervisorError), self._served.guest() as guest:
            try:
                for offset in range(0, self._much, 65536):
                    guest.write(offset, CONTENT[:65536])
                guest.wait()
            except HypervisorError as exc:
                self.error = exc

    def held(self, log: WriteLog) -> int:
        """Wait until it is held; how much of the log is not consumed then."""
        before = log.waited()
        until(lambda: log.waited() > before + 0.02)
        return log.size() - log.consumed

    def end(self) -> None:
        self.thread.join(10.0)
        assert not self.thread.is_alive()
