"""The nbdkit process of each replicated disk: it outlives the agent, and only `stop` stops it.

The files of nbdkit are in a directory that belongs to root. The socket is in a separate directory,
because QEMU connects to it and usually runs as another user.
"""

import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import BadInput
from vmckpt.replication.disks import epoch_log
from vmckpt.replication.disks.epoch_log import DiskLogError, LogPlace
from vmckpt.replication.disks.log_control import Control
from vmckpt.units import MIB, Bytes, Seconds

PACKAGES = ("nbdkit", "nbdkit-plugin-python")
"""The Debian packages that are required."""

# Space beyond the limit for the writes in flight when the guest is paused: more than 128 of QEMU's
# longest writes.
_MORE = 512 * MIB
_LONGEST_SOCKET = 107
_PLUGIN = Path(__file__).with_name("nbdkit_plugin.py")
_STARTS = Seconds(20.0)
_ENDS = Seconds(5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """The socket through which QEMU connects to the server, and its permissions.

    Setting another owner needs root.
    """

    path: Path
    owner: tuple[int, int] | None = None
    """User and group IDs of QEMU, which nbdkit also uses; None: the IDs of this process."""
    mode: int = 0o600
    folder_mode: int = 0o711
    """Mode of the socket's directory, if it must be created."""


def start(place: LogPlace, socket: Socket, *, size: Bytes, limit: Bytes) -> int:
    """Serve a new, empty log for a disk, unless its server is already running.

    `size`: size of the disk; `limit`: number of unconsumed bytes in the log beyond which the
    guest's writes wait. Returns the process ID of nbdkit, which is not a child of this process. If
    a server has died, the part of its log that was not read is lost, and QEMU notices this only at
    its next write. In that case, call `mirror_job.end` first, and copy the complete disk again
    afterwards. Raises DiskLogError, BadInput.
    """
    if len(os.fsencode(socket.path)) > _LONGEST_SOCKET:
        raise BadInput(f"{socket.path} is too long for the path of a socket")
    try:
        if running(place) is None:
            _make(place, socket)
            _launch(place, socket, size=size, limit=limit)
        process = _begun(place)
        if socket.owner is not None:
            os.chown(socket.path, *socket.owner)
        socket.path.chmod(socket.mode)
    except OSError as exc:
        raise DiskLogError(f"the write log {place.log} cannot be served: {exc}") from exc
    return process


def _make(place: LogPlace, socket: Socket) -> None:
    place.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not socket.path.parent.exists():
        socket.path.parent.mkdir(parents=True)
        socket.path.parent.chmod(socket.folder_mode)
    # A server that died may have left its socket.
    socket.path.unlink(missing_ok=True)
    os.close(os.open(place.log, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    Control.create(place.control)


def installed() -> bool:
    """Return whether nbdkit and its Python plugin are installed on this host."""
    try:
        done = subprocess.run(
            ["nbdkit", "--dump-plugin", "python"], stdin=subprocess.DEVNULL, capture_output=True,
            check=False, timeout=_STARTS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _launch(place: LogPlace, socket: Socket, *, size: int, limit: int) -> None:
    command = ["nbdkit", "--unix", str(socket.path)]
    if socket.owner is not None:
        command += ["--user", str(socket.owner[0]), "--group", str(socket.owner[1])]
    facts = {"log": place.log, "control": place.control, "size": size}
    facts |= {"limit": limit, "most": limit + _MORE}
    command += ["python", str(_PLUGIN), *(f"{key}={value}" for key, value in facts.items())]
    # The command returns once the socket exists; nbdkit keeps running in the background, and would
    # keep a pipe open.
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                start_new_session=True, cwd="/", check=False, timeout=_STARTS,
            )  # fmt: skip
        except FileNotFoundError:
            raise DiskLogError(
                "nbdkit is not installed on the guest's host",
                hint=f"install {' and '.join(PACKAGES)} on that host",
            ) from None
        except subprocess.TimeoutExpired:
            raise DiskLogError(f"nbdkit did not start within {_STARTS:g} s") from None
        if done.returncode != 0:
            said.seek(0)
            lines = said.read(4096).decode(errors="replace").strip().splitlines()
            raise DiskLogError(
                f"nbdkit did not start: {lines[-1] if lines else f'status {done.returncode}'}",
                hint=f"check that {' and '.join(PACKAGES)} are installed on the guest's host",
            )


def _begun(place: LogPlace) -> int:
    """Wait until nbdkit is serving, shortly after it went to the background.

    Returns its process ID. Raises DiskLogError, at once if nbdkit has exited.
    """
    give_up = time.monotonic() + _STARTS
    while time.monotonic() < give_up:
        began = _recorded(place)
        if (process := running(place)) is not None:
            return process
        if began:
            raise DiskLogError(f"the write log {place.log}: nbdkit (process {began}) has exited")
        time.sleep(0.002)
    raise DiskLogError(
        f"the write log {place.log}: nbdkit did not begin to serve it within {_STARTS:g} s"
    )


def _recorded(place: LogPlace) -> int:
    """Return the process ID that this log's nbdkit recorded; 0 if it has recorded none."""
    with suppress(OSError, ValueError), Control(place.control) as control:
        return control.process
    return 0


def running(place: LogPlace) -> int | None:
    """Return the process ID of this log's nbdkit; None if it is not running."""
    with suppress(OSError, ValueError), Control(place.control) as control:
        return epoch_log.nbdkit_process(place.log, control)
    return None


def stop(place: LogPlace, socket: Socket) -> None:
    """Kill nbdkit and remove its files and socket, if they exist.

    The mirror must be removed first. Raises DiskLogError.
    """
    try:
        _kill(place)
        for path in (socket.path, place.control, place.log):
            path.unlink(missing_ok=True)
    except OSError as exc:
        raise DiskLogError(f"the write log {place.log} cannot be removed: {exc}") from exc


def _kill(place: LogPlace) -> None:
    process = running(place)
    if process is None:
        return
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        # Check again, now that the process ID cannot be reused. SIGKILL is safe: nbdkit has nothing
        # to clean up, and after another signal nbdkit might wait for a hung connection.
        if running(place) == process:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not select.select([handle], [], [], _ENDS)[0]:
                raise DiskLogError(f"nbdkit (process {process}) of {place.log} did not exit")
    finally:
        os.close(handle)
