"""The nbdkit process of each replicated disk: it outlives the agent, and ends by `stop` alone.

Its files lie in a folder that belongs to root; its socket has a folder of its own, since QEMU
connects to it, which is another user as a rule.
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
"""Debian's, which must be there."""

# Beyond the limit, for the writes under way at a `stop`: 128 of QEMU's longest ones, and more.
_MORE = 512 * MIB
_LONGEST_SOCKET = 107
_PLUGIN = Path(__file__).with_name("nbdkit_plugin.py")
_STARTS = Seconds(20.0)
_ENDS = Seconds(5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Socket:
    """Where QEMU finds the server, and who may connect. As root alone can it be somebody else's."""

    path: Path
    owner: tuple[int, int] | None = None
    """User and group of QEMU; None: ours. nbdkit itself runs as them, too."""
    mode: int = 0o600
    folder_mode: int = 0o711
    """Of the socket's folder, if it must be made."""


def start(place: LogPlace, socket: Socket, *, size: Bytes, limit: Bytes) -> int:
    """Serve a new, empty log for a disk of so many bytes; the process, which is in no way a child.

    One that runs already goes on. One that died took what was not read of its log along, and QEMU
    sees that at the next write only: `mirror_job.end` first, and then all of the disk anew.
    `limit`: bytes of the log that may wait for the backup before the guest's writes do.
    Raises DiskLogError, BadInput.
    """
    if len(os.fsencode(socket.path)) > _LONGEST_SOCKET:
        raise BadInput(f"{socket.path} is too long for a socket's name")
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
    # Of one that died.
    socket.path.unlink(missing_ok=True)
    os.close(os.open(place.log, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
    Control.create(place.control)


def installed() -> bool:
    """Whether nbdkit and its Python plugin are on this host."""
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
    # It comes back when the socket is there, and goes on in the background. A pipe would be held
    # open by that.
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                start_new_session=True, cwd="/", check=False, timeout=_STARTS,
            )  # fmt: skip
        except FileNotFoundError:
            raise DiskLogError(
                "nbdkit is not installed here", hint=f"install {' and '.join(PACKAGES)}"
            ) from None
        except subprocess.TimeoutExpired:
            raise DiskLogError(f"nbdkit did not start in {_STARTS:g} s") from None
        if done.returncode != 0:
            said.seek(0)
            lines = said.read(4096).decode(errors="replace").strip().splitlines()
            raise DiskLogError(
                f"nbdkit does not start: {lines[-1] if lines else f'status {done.returncode}'}",
                hint=f"see that {' and '.join(PACKAGES)} are installed",
            )


def _begun(place: LogPlace) -> int:
    """It serves a moment after it has gone to the background."""
    give_up = time.monotonic() + _STARTS
    while time.monotonic() < give_up:
        if (process := running(place)) is not None:
            return process
        time.sleep(0.002)
    raise DiskLogError(f"the write log {place.log}: nbdkit has ended at once")


def running(place: LogPlace) -> int | None:
    """The nbdkit of this log; None if it does not run."""
    with suppress(OSError, ValueError), Control(place.control) as control:
        return epoch_log.nbdkit_process(place.log, control)
    return None


def stop(place: LogPlace, socket: Socket) -> None:
    """End it, and remove its files and its socket; fine if there are none. The mirror must be gone.

    Raises DiskLogError.
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
        # Looked at again, now that its number cannot become another's. It has nothing to tidy up,
        # and might wait for a connection that hangs.
        if running(place) == process:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not select.select([handle], [], [], _ENDS)[0]:
                raise DiskLogError(f"nbdkit {process} of {place.log} does not end")
    finally:
        os.close(handle)
