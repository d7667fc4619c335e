"""End a protection on the primary, and clean up after it, however it ended."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.agent.replication import mirrors
from vmckpt.capture import migration_settings
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import VmckptError
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity, lease_timer
from vmckpt.hypervisor.qemu_process.pidfd import HeldProcess
from vmckpt.hypervisor.qmp import QmpMonitor
from vmckpt.lease.client import LeaseClient
from vmckpt.lease.clock import boottime
from vmckpt.replication.primary import network_buffer
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.protocol import connection
from vmckpt.replication.protocol.connection import PeerConnection
from vmckpt.replication.protocol.messages import End, Hello, HelloAck
from vmckpt.replication.session import ProtectionOutcome, Session, memory_of, remove_folder
from vmckpt.replication.watchdog import process as watchdog_process
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds
from vmckpt.util import atomic_file

OUTCOME, ALONE = "outcome.json", "alone"
_DEFINITION = "definition.json"
_ENDS = Seconds(5.0)
_CONNECT = Seconds(3.0)
_HEARS, _AGAIN = Seconds(10.0), Seconds(0.5)


def unprotect(
    session: Session, folder: Path, monitor: QmpMonitor, lease_holder: LeaseHolder | None = None
) -> None:
    """Let the guest run on this host as if it had never been protected; may be repeated.

    `lease_holder`: None if the standby is already invalid or gone. Raises VmckptError if something
    could not be undone, and OSError.
    """
    if lease_holder is not None:
        # Releasing output makes the standby outdated, so it must be invalidated first.
        lease_holder.invalidate()
    else:
        disarm(session)
    note_alone(folder)  # before output is released: no standby may take over from now on
    network_buffer.remove(monitor, folder)
    migration_settings.break_off(monitor, Undo.from_json(session.undo))
    mirrors.end_all(session, folder, monitor)
    if libvirt_side.stored(monitor) is None:
        define(session)
    (folder / watchdog_process.OVER).touch()
    if lease_holder is not None:
        with suppress(VmckptError):
            lease_holder.release()
    forget(session, folder)


def renewed(session: Session, sent: float) -> None:
    """Extend the kernel's timer in QEMU after a process other than the agent renewed the lease.

    `sent`: when the renewal was sent, by CLOCK_BOOTTIME. Raises VmckptError, OSError.
    """
    process = identity.hold(session.guest)
    if process is None or session.lease is None:
        return
    with process:
        if lease_timer.armed(process) is not None:
            lease_timer.arm(process, sent + session.lease.terms.lasts)


def disarm(session: Session) -> None:
    """Disarm the kernel's timer in QEMU, since no other host may take over any more.

    Raises VmckptError, OSError.
    """
    process = identity.hold(session.guest)
    if process is not None:
        with process:
            lease_timer.disarm(process)


def keep_definition(session: Session) -> None:
    """Write the guest's persistent definition to disk, to survive a reboot. Raises OSError."""
    if session.definition:
        folder = Path(session.state)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        told = {"xml": session.definition, "autostart": bool(session.extra.get("autostart"))}
        atomic_file.put(folder / _DEFINITION, json.dumps(told), private=True, for_good=True)


def define(session: Session) -> None:
    """Define the guest in libvirt again, unless it was transient. Raises HypervisorError."""
    if session.definition:
        autostart = bool(session.extra.get("autostart"))
        where = {"host": session.host, "uri": session.uri}
        libvirt_side.define(session.definition, **where, autostart=autostart)


def define_kept(state: str, *, host: str, uri: str) -> bool:
    """Define the guest from the file that `keep_definition` wrote, after a reboot.

    Then removes the directory `state`. Returns whether the file could be read. Raises
    HypervisorError.
    """
    file = Path(state) / _DEFINITION
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError):
        return False
    libvirt_side.define(told["xml"], host=host, uri=uri, autostart=bool(told["autostart"]))
    shutil.rmtree(state, ignore_errors=True)
    return True


def guest_ended(session: Session, folder: Path, *, wished: bool) -> None:
    """End the protection of a guest whose QEMU is gone.

    `wished`: the guest shut down, panicked or was stopped on request; otherwise the backup may take
    over. Raises VmckptError, OSError.
    """
    wished = wished or ended_by_wish(folder)  # as recorded by an earlier agent
    if wished:
        outcome(
            folder,
            ProtectionOutcome.ENDED,
            "the guest shut down, panicked or was stopped on request",
        )
    mirrors.end_all(session, folder, None)
    if not wished:
        outcome(
            folder, ProtectionOutcome.DIED, watchdog_kill_reason(folder) or "the guest's QEMU died"
        )
        with suppress(VmckptError, OSError, ValueError):
            _hand_over(session, folder)
        (folder / watchdog_process.OVER).touch()
        for copy in memory_of(folder).glob("last-*"):
            copy.unlink()  # each copy is as large as the guest's memory
        return
    (folder / watchdog_process.OVER).touch()
    if _standby_is_told(session, folder):
        # From now on no other host can run the guest.
        define(session)
        forget(session, folder)


def ended_by_wish(folder: Path) -> bool:
    """Return whether the recorded outcome is a shutdown, a panic or a stop on request."""
    with suppress(OSError, ValueError):
        return bool(
            json.loads((folder / OUTCOME).read_text()).get("outcome") == ProtectionOutcome.ENDED
        )
    return False


def watchdog_kill_reason(folder: Path) -> str | None:
    """Return why the watchdog killed a guest, or that the kernel's lease timer may have killed it.

    Returns None if neither is the case. The guest's QEMU must be gone.
    """
    try:
        _, _, why = (folder / watchdog_process.KILLED).read_text().strip().partition(" ")
    except OSError:
        return _lease_ended(folder)
    return f"the watchdog killed the guest: {why}"


def _lease_ended(folder: Path) -> str | None:
    """Return a reason if the lease has expired, so the kernel may have killed QEMU; otherwise None.

    The kernel records nothing when its timer kills QEMU, and only QEMU's parent gets the exit
    status. Therefore a QEMU that died earlier, while no agent was running, looks the same.
    """
    try:
        page = WatchdogPage.open(folder / watchdog_process.PAGE)
    except (OSError, ValueError):
        return None
    try:
        if not page.renewed or boottime() < page.renewed + page.lasts:
            return None
        return (
            "the guest's QEMU is gone, and its lease has expired: either the kernel killed QEMU, or"
            " QEMU died before the lease expired"
        )
    finally:
        page.close()


def _standby_is_told(session: Session, folder: Path) -> bool:
    """Inform the standby that the guest has stopped. Returns whether it can never take over."""
    released = False
    with suppress(VmckptError, OSError, ValueError):
        if session.lease is not None:
            # Done first, since the lease may expire while the backup is being contacted.
            _release(session, folder)
            released = True
    return _hears_in_time(session, folder) or released


def _hears_in_time(session: Session, folder: Path) -> bool:
    """Inform the backup that the protection is over. Returns whether the backup confirmed this.

    The message is repeated for 10 s: a busy host that missed the only message would wait forever.
    """
    give_up = time.monotonic() + _HEARS
    while True:
        with suppress(VmckptError, OSError, ValueError):
            _tell_backup(session, folder, "the guest has stopped")
            return True
        if time.monotonic() >= give_up:
            return False
        time.sleep(_AGAIN)


def give_away(session: Session, lease_holder: LeaseHolder, process: HeldProcess) -> None:
    """Transfer the lease of a paused guest to the backup, and kill QEMU here.

    Raises VmckptError if the lease was not transferred.
    """
    lease_holder.transfer(session.peer)
    kill(process)


def kill(process: HeldProcess) -> None:
    """Kill a QEMU process, and wait until it is gone."""
    process.end(_ENDS)


def switched(session: Session, folder: Path) -> None:
    """Clean up after a planned switchover, and record its outcome. Raises VmckptError, OSError."""
    (folder / watchdog_process.OVER).touch()
    mirrors.end_all(session, folder, None)
    outcome(folder, ProtectionOutcome.SWITCHED, f"the guest is running on {session.peer}")


def note_alone(folder: Path) -> None:
    """Record that the guest runs unprotected: its output is no longer buffered. Raises OSError."""
    (folder / ALONE).touch()


def is_alone(folder: Path) -> bool:
    """Return whether the guest ran unprotected, and the standby has not been complete since."""
    return (folder / ALONE).exists()


def forget(session: Session, folder: Path) -> None:
    """Remove the files of a protection that has ended on this host."""
    shutil.rmtree(session.state, ignore_errors=True)
    remove_folder(folder)


def outcome(folder: Path, what: ProtectionOutcome, why: str, **more: float) -> None:
    """Record for the controller how the protection ended. Raises OSError.

    `folder`: the session's directory; `more`: further numbers for the record, by name.
    """
    told = {"outcome": what, "why": why, "at": time.time(), **more}
    atomic_file.put(folder / OUTCOME, json.dumps(told))


@contextmanager
def lease(session: Session) -> Iterator[LeaseClient]:
    """Open a client for the lease of a session.

    Raises ValueError if the session has no lease, and BadInput.
    """
    if session.lease is None:
        raise ValueError("the session has no lease")
    client = LeaseClient(session.lease.url, holder=session.host, limit=session.lease.terms.limit)
    try:
        yield client
    finally:
        client.close()


def token(folder: Path) -> int:
    """Return the lease's token, as stored by the agent. Raises OSError, ValueError."""
    return int((folder / "token").read_text())


def _hand_over(session: Session, folder: Path) -> None:
    """Hand a dead guest's lease to the backup, which then need not wait until it expires."""
    if session.lease is None or not session.terms.automatic:
        return
    if identity.runs(session.guest):
        return
    with lease(session) as client:
        client.hand_over(token(folder), session.peer)


def _release(session: Session, folder: Path) -> None:
    if session.lease is None:
        return
    with lease(session) as client:
        client.release(token(folder))


def _tell_backup(session: Session, folder: Path, why: str) -> None:
    made = connection.connect(folder, (session.address, session.port), limit=_CONNECT)
    ours = token(folder) if session.lease is not None else 1
    with PeerConnection(made, lambda: ours, takes=lambda told: told <= ours) as line:
        line.send(Hello(session=session.session, captured=1))
        line.expect(HelloAck, _CONNECT)
        line.send(End(why=why))
        # Closing while a heartbeat arrives would reset the connection and lose unread data.
        line.expect(End, _CONNECT)
