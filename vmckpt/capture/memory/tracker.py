"""Start, use and end the trackers of guests; see `tracker_process`.

Each QEMU process has its own socket below /run/vmckpt, which only root can reach.
"""

import json
import re
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from vmckpt.capture.memory import memory_files
from vmckpt.capture.memory.ram_blocks import RamBlock
from vmckpt.capture.memory.tracker_process import LONGEST
from vmckpt.capture.memory.write_tracking import MemoryRange
from vmckpt.errors import GuestLocked
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.units import Seconds
from vmckpt.util import host_directories

_MODULE = "vmckpt.capture.memory.tracker_process"
_FOLDER = "tracking"
_SOCKET = re.compile(r"[0-9a-f-]{36}-(\d+)-(\d+)\.sock")
_PATIENCE = Seconds(5.0)


@dataclass(frozen=True, slots=True)
class TrackerState:
    """What a tracker keeps."""

    number: int | None
    """Number of the capture since which writes have been tracked; None: the last capture failed or
    is not complete."""
    blocks: tuple[RamBlock, ...]
    """The blocks of memory that are tracked."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """Parse a state. Raises LookupError, TypeError, ValueError."""
        number = told["number"]
        blocks = tuple(
            RamBlock(
                str(one["name"]), MemoryRange(int(one["range"]["start"]), one["range"]["size"])
            )
            for one in told["blocks"]
        )
        return cls(None if number is None else int(number), blocks)


class LentTracking:
    """The write tracking of a guest, taken from its tracker. Use as a context manager.

    Leaving the block returns the tracking to the tracker. Without `keep`, the next capture reads
    all memory.
    """

    def __init__(self, line: socket.socket, state: TrackerState, descriptor: int) -> None:
        self._line = line
        self.state = state
        self.descriptor = descriptor
        """A duplicate of the userfaultfd; it belongs to the caller."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def keep(self, number: int) -> None:
        """Record that capture `number` is complete: from now on, writes since it are tracked.

        Raises OSError.
        """
        self._line.send(json.dumps({"do": "keep", "number": number}).encode())
        if not self._line.recv(LONGEST):
            raise ConnectionResetError("the process that tracks the guest's writes has exited")

    def end(self) -> None:
        """End the tracker. Raises OSError."""
        _end(self._line)


def place(guest: str, process: int) -> Path:
    """Return the path of the socket for a guest's QEMU process. Raises RemoteError, OSError."""
    name = f"{guest}-{process}-{memory_files.start_time(process)}.sock"
    return host_directories.run_dir(_FOLDER) / name


def take(guest: str, process: HeldProcess) -> LentTracking | None:
    """Take over the write tracking of a guest; None if no tracker of it answers correctly.

    Raises GuestLocked if another agent uses the tracker, RemoteError, OSError.
    """
    path = place(guest, process.pid)
    line = _connected(path)
    if line is None:
        return None
    try:
        line.send(json.dumps({"do": "take"}).encode())
        message, files, _, _ = socket.recv_fds(line, LONGEST, 1)
    except TimeoutError as exc:
        line.close()
        raise _busy(guest) from exc
    except OSError:  # the tracker has just ended
        line.close()
        return None
    try:
        if len(files) == 1:
            return LentTracking(line, TrackerState.from_json(json.loads(message)), files[0])
    except (ValueError, LookupError, TypeError):
        pass
    for one in files:
        socket.close(one)
    line.close()
    return None


def start(guest: str, process: HeldProcess, state: TrackerState, descriptor: int) -> None:
    """Start the tracker of a guest, with a duplicate of this userfaultfd.

    Raises RemoteError, OSError, subprocess.CalledProcessError.
    """
    path = place(guest, process.pid)
    path.unlink(missing_ok=True)  # of a tracker that was killed
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(4)
        facts = {
            "listener": listener.fileno(), "qemu": process.pidfd, "userfaultfd": descriptor,
            "state": state.as_json(),
        }  # fmt: skip
        # The tracker outlives this process and its session.
        subprocess.run(
            ["setsid", "--fork", sys.executable, "-P", "-m", _MODULE],
            input=json.dumps(facts).encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(listener.fileno(), process.pidfd, descriptor), check=True,
        )  # fmt: skip


def end(guest: str) -> bool:
    """End the tracker of a guest. Returns whether it had one.

    The guest's next snapshot reads all memory. Raises GuestLocked if an agent uses the tracker,
    RemoteError, OSError.
    """
    found = False
    for path in _sockets(f"{guest}-*.sock"):
        if (line := _connected(path)) is None:
            continue
        with line:
            try:
                _end(line)
            except TimeoutError as exc:
                raise _busy(guest) from exc
        found = True
    return found


def sweep() -> None:
    """Remove the sockets of trackers that were killed, if their QEMU has ended as well.

    Raises RemoteError.
    """
    with suppress(OSError):
        for path in _sockets("*.sock"):
            found = _SOCKET.fullmatch(path.name)
            if found is not None and not memory_files.lives(int(found[1]), found[2]):
                path.unlink(missing_ok=True)


def _sockets(pattern: str) -> list[Path]:
    if not (host_directories.RUN / _FOLDER).is_dir():
        return []
    return list(host_directories.run_dir(_FOLDER).glob(pattern))


def _end(line: socket.socket) -> None:
    with suppress(ConnectionError):
        line.send(json.dumps({"do": "end"}).encode())
        line.recv(LONGEST)  # until the tracker closes the line


def _connected(path: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(_PATIENCE)
    try:
        line.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        line.close()
        return None
    except BaseException:
        line.close()
        raise
    return line


def _busy(guest: str) -> GuestLocked:
    return GuestLocked(
        f"another agent is using the write tracking of guest {guest}",
        hint="try again when the other snapshot is complete",
    )
