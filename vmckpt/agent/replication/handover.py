"""How a guest that stands still becomes the other host's for good.

Of a protection QEMU is ended first, once the lease says so. Of a migration a file says so: once it
is there no agent lets the guest run here again, and only then the other host is told. QEMU stands
as it does after any migration, with its disks given up, until the guest is known to run there (so
nobody waits for its end), or never to have run there: then the controller takes it back.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from vmckpt.agent.replication import teardown
from vmckpt.errors import GuestLocked, HypervisorError, RemoteError, VmckptError
from vmckpt.hypervisor import connection
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.protocol import connection as protocol_connection
from vmckpt.replication.protocol.connection import ConnectionLost, PeerConnection
from vmckpt.replication.protocol.messages import End, WireError
from vmckpt.replication.session import Session
from vmckpt.units import Seconds
from vmckpt.util import atomic_file
from vmckpt.util.host_files import hold_path, path_of

AGENT_LOCK = "agent.lock"
_GIVEN = "given.json"
_TOKEN = 1
"""Of a session without a lease."""
_ARRIVES = Seconds(10.0)
_CONNECT = Seconds(1.0)
_LETS_GO = Seconds(10.0)
_LOCKS = Seconds(5.0)
_TURN = Seconds(0.05)


def hand_over(
    session: Session,
    folder: Path,
    line: PeerConnection,
    *,
    lease_holder: LeaseHolder,
    process: HeldProcess,
    stopped: float,
) -> None:
    """The guest has stood still since `stopped`, and the backup has all of it.

    Raises VmckptError, OSError: it is not given away. A migration raises nothing once it is.
    """
    if not session.moves:
        teardown.give_away(session, lease_holder, process)
        line.send(End(why="switched"))
        return
    _note(session, folder, stopped)
    give_up = time.monotonic() + _ARRIVES
    try:
        runs = _said(line, give_up)
    except (ConnectionLost, WireError):
        runs = _say_again(session, folder, give_up)
    if runs:
        with suppress(VmckptError):  # who ends it does it again
            finish(session, folder)


def resend(session: Session, folder: Path) -> None:
    """An agent before us gave it away, and may not have been heard."""
    if _say_again(session, folder, time.monotonic() + _ARRIVES):
        finish(session, folder)


def _said(line: PeerConnection, give_up: float) -> bool:
    """Give the guest to the target; whether it runs there. Raises ConnectionLost, WireError."""
    line.send(End(why="switched"))
    while time.monotonic() < give_up:
        if isinstance(line.receive(_TURN), End):
            return True
    return False


def _say_again(session: Session, folder: Path, give_up: float) -> bool:
    """Over lines of its own, without a hello: who says hello may yet go on."""
    while time.monotonic() < give_up:
        with suppress(OSError, VmckptError):
            made = protocol_connection.connect(
                folder, (session.address, session.port), limit=_CONNECT
            )
            with PeerConnection(made, lambda: _TOKEN) as line:
                return _said(line, give_up)
        time.sleep(_TURN)
    return False


def handover_record(folder: Path) -> dict[str, Any] | None:
    """What was noted when the guest was given away; None: it was not."""
    try:
        return dict(json.loads((folder / _GIVEN).read_text()))
    except FileNotFoundError:
        return None


def revert(folder: Path) -> None:
    """The other host had it and will never run it: it may run here again."""
    (folder / _GIVEN).unlink(missing_ok=True)


def finish(session: Session, folder: Path) -> None:
    """End what is left of a guest that was given away; may be repeated. Raises VmckptError."""
    process = identity.hold(session.guest)
    if process is not None:
        with process:
            teardown.kill(process)
    noted = handover_record(folder) or {}
    _wait_for_libvirt(session)
    for path, owner in dict(noted.get("owners") or {}).items():
        with suppress(OSError):
            _put_owner_back(path, *(int(one) for one in owner))


@contextmanager
def only_agent(session: Session, folder: Path) -> Iterator[None]:
    """Be the one agent of the folder. Raises GuestLocked: there is one."""
    with (folder / AGENT_LOCK).open("w") as lock:
        if not locked(lock):
            raise GuestLocked(f"{session.name} has an agent already")
        yield


@contextmanager
def without_agent(session: Session, folder: Path) -> Iterator[None]:
    """No agent of the folder runs, or begins, as long as the block lasts. Raises RemoteError."""
    with (folder / AGENT_LOCK).open("w") as lock:
        if not locked(lock):
            raise RemoteError(f"{session.host}: the agent of {session.name} does not end")
        yield


def locked(lock: IO[str]) -> bool:
    """Wait for a moment for the lock of the process that works with the guest; whether it is ours.

    The watchdog takes it, too, while it resumes a guest whose agent died.
    """
    give_up = time.monotonic() + _LOCKS
    while True:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() > give_up:
            return False
        time.sleep(_TURN)


def _note(session: Session, folder: Path, stopped: float) -> None:
    """Raises OSError: then it is not given away."""
    owners = {}
    for path in session.extra.get("shared", ()):
        with suppress(OSError), hold_path(Path(path)) as file:
            seen = os.fstat(file)
            owners[path] = (seen.st_uid, seen.st_gid, seen.st_dev, seen.st_ino)
    told = {"stood_s": time.monotonic() - stopped, "owners": owners}
    atomic_file.put(folder / _GIVEN, json.dumps(told))


def _wait_for_libvirt(session: Session) -> None:
    """Until libvirt has put its own things in order: it takes a QEMU that died for a guest that
    ended, and gives the guest's images back to root. Raises HypervisorError."""
    give_up = time.monotonic() + _LETS_GO
    while time.monotonic() < give_up:
        try:
            with QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor:
                if not monitor.is_active():
                    return
        except HypervisorError as exc:
            if exc.code in connection.NOT_HERE:
                return
            raise
        time.sleep(_TURN)


def _put_owner_back(path: str, user: int, group: int, device: int, inode: int) -> None:
    """On storage that both hosts see the image is in use there. Another file is left alone."""
    with hold_path(Path(path)) as file:
        seen = os.fstat(file)
        if (seen.st_dev, seen.st_ino) == (device, inode) and (
            (seen.st_uid, seen.st_gid) != (user, group)
        ):
            os.chown(path_of(file), user, group)
