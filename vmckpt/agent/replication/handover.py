"""Hand a paused guest over to the other host permanently.

In a protection, the lease is transferred and QEMU is killed before the other host is informed. In a
migration, a record file is written before the other host is informed. While this file exists, no
agent resumes the guest here. QEMU stays paused, with its disks released, as after any migration.
QEMU is killed once the guest is known to be running on the other host. If the guest is known never
to have run there, the controller resumes the guest here.
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
from vmckpt.replication.protocol.messages import HANDED_OVER, End, WireError
from vmckpt.replication.session import Session
from vmckpt.units import Seconds
from vmckpt.util import atomic_file
from vmckpt.util.host_files import hold_path, path_of

AGENT_LOCK = "agent.lock"
_GIVEN = "given.json"
_TOKEN = 1
"""Token of a session without a lease."""
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
    """Hand the guest over. The backup must have the guest's complete state.

    `stopped`: when the guest was paused, by time.monotonic(). Raises VmckptError or OSError if the
    guest was not handed over. In a migration, a failure after the handover raises no error.
    """
    if not session.moves:
        teardown.give_away(session, lease_holder, process)
        line.send(End(why=HANDED_OVER))
        return
    _note(session, folder, stopped)
    give_up = time.monotonic() + _ARRIVES
    try:
        runs = _said(line, give_up)
    except (ConnectionLost, WireError):
        runs = _say_again(session, folder, give_up)
    if runs:
        with suppress(VmckptError):  # the order that ends the migration repeats this step
            finish(session, folder)


def resend(session: Session, folder: Path) -> None:
    """Inform the other host of a handover again, in case an earlier agent failed to.

    Raises VmckptError, OSError.
    """
    if _say_again(session, folder, time.monotonic() + _ARRIVES):
        finish(session, folder)


def _said(line: PeerConnection, give_up: float) -> bool:
    """Instruct the target to run the guest. Returns whether the target confirmed that the guest is
    running.

    `give_up`: when to stop waiting, by time.monotonic(). Raises ConnectionLost, WireError.
    """
    line.send(End(why=HANDED_OVER))
    while time.monotonic() < give_up:
        if isinstance(line.receive(_TURN), End):
            return True
    return False


def _say_again(session: Session, folder: Path, give_up: float) -> bool:
    """Like `_said`, but over new connections. Sends no Hello, since no epoch follows."""
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
    """Return the record of the handover; None if the guest was not handed over. Raises OSError."""
    try:
        return dict(json.loads((folder / _GIVEN).read_text()))
    except FileNotFoundError:
        return None


def revert(folder: Path) -> None:
    """Revert a handover that the other host will never complete: the guest may run here again.

    Raises OSError.
    """
    (folder / _GIVEN).unlink(missing_ok=True)


def finish(session: Session, folder: Path) -> None:
    """Kill the QEMU of a guest that was handed over; may be repeated. Raises VmckptError, OSError.

    Restores the owners of images on shared storage, which libvirt resets when QEMU terminates.
    """
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
    """Hold the lock of the protection's agent. Raises GuestLocked if another agent holds it."""
    with (folder / AGENT_LOCK).open("w") as lock:
        if not locked(lock):
            raise GuestLocked(f"vmckpt's agent for {session.name} is already running")
        yield


@contextmanager
def without_agent(session: Session, folder: Path) -> Iterator[None]:
    """Keep agents of the protection from running while the block lasts.

    Raises RemoteError if a running agent does not stop.
    """
    with (folder / AGENT_LOCK).open("w") as lock:
        if not locked(lock):
            raise RemoteError(f"{session.host}: vmckpt's agent for {session.name} does not stop")
        yield


def locked(lock: IO[str]) -> bool:
    """Try for 5 s to take the lock of the process that controls the guest.

    Returns whether the lock was taken. The watchdog also takes this lock, while it resumes a guest
    whose agent died.
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
    """Write the record of the handover.

    `stopped`: when the guest was paused, by time.monotonic(). Raises OSError; the guest is then not
    handed over.
    """
    owners = {}
    for path in session.extra.get("shared", ()):
        with suppress(OSError), hold_path(Path(path)) as file:
            seen = os.fstat(file)
            owners[path] = (seen.st_uid, seen.st_gid, seen.st_dev, seen.st_ino)
    told = {"stood_s": time.monotonic() - stopped, "owners": owners}
    atomic_file.put(folder / _GIVEN, json.dumps(told))


def _wait_for_libvirt(session: Session) -> None:
    """Wait up to 10 s until libvirt has cleaned up after QEMU and reset the owners of the images.

    Raises HypervisorError.
    """
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
    """Restore the owner of an image that the other host uses on shared storage.

    `user` and `group` are IDs. Does nothing if the file at that path is not the one with `device`
    and `inode`.
    """
    with hold_path(Path(path)) as file:
        seen = os.fstat(file)
        if (seen.st_dev, seen.st_ino) == (device, inode) and (
            (seen.st_uid, seen.st_gid) != (user, group)
        ):
            os.chown(path_of(file), user, group)
