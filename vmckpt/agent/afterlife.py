"""What becomes of a protection when it ends: on the primary, whichever way it did."""

import json
import os
import select
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

from vmckpt.checkpoint import settings, userfault
from vmckpt.checkpoint.settings import Undo
from vmckpt.errors import VmckptError
from vmckpt.hypervisor import standby as libvirt_side
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.lease.witness import LeaseClient
from vmckpt.replicate import buffers, guard, link, logserver, mirroring
from vmckpt.replicate.diskepochs import LogPlace
from vmckpt.replicate.facts import Session
from vmckpt.replicate.link import Line
from vmckpt.replicate.logserver import Socket
from vmckpt.replicate.tenure import Tenure
from vmckpt.replicate.wire import End, Hello
from vmckpt.units import Seconds

OUTCOME = "outcome.json"
_ENDS = Seconds(5.0)
_CONNECT = Seconds(1.0)


def unprotect(
    session: Session, folder: Path, monitor: Monitor, tenure: Tenure | None = None
) -> None:
    """The guest runs on here as if it had never been protected; may be repeated.

    Raises VmckptError: not all is put back.
    """
    if tenure is not None:
        # Before anything gets out that the standby does not know.
        tenure.invalidate()
    buffers.remove(monitor, session.cards)
    settings.break_off(monitor, Undo.from_json(session.undo))
    _end_writes(session, folder, monitor)
    define(session, monitor)
    (folder / guard.OVER).touch()
    if tenure is not None:
        with suppress(VmckptError):
            tenure.release()
    shutil.rmtree(folder, ignore_errors=True)


def define(session: Session, monitor: Monitor | None = None) -> None:
    """Store the definition that was taken away, unless there is one. Raises HypervisorError."""
    if not session.definition:
        return
    if monitor is not None and libvirt_side.stored(monitor) is not None:
        return
    libvirt_side.define(
        session.definition,
        host=session.host,
        uri=session.uri,
        autostart=bool(session.extra.get("autostart")),
    )


def _end_writes(session: Session, folder: Path, monitor: Monitor | None) -> None:
    for number in range(len(session.disks)):
        place = LogPlace(folder=folder / "writes", disk=number)
        if monitor is not None:
            mirroring.end(monitor, mirroring.name_of(number))
        logserver.stop(place, Socket(path=folder / "nbd" / f"{number}.sock"))


def guest_ended(session: Session, folder: Path, *, wished: bool) -> None:
    """Its QEMU is gone. If nobody wished for that, the backup runs it. Raises VmckptError."""
    (folder / guard.OVER).touch()
    _end_writes(session, folder, None)
    if wished:
        define(session)
        with suppress(VmckptError):
            _tell_backup(session, folder, "the guest has ended")
        with suppress(VmckptError):
            _release(session, folder)
        shutil.rmtree(folder, ignore_errors=True)
        return
    outcome(folder, "died", "the guest's QEMU died")
    with suppress(VmckptError):
        _hand_over(session, folder)


def guest_died(session: Session, folder: Path) -> None:
    """The same for one that ended while no agent looked: nobody is known to have wished it."""
    guest_ended(session, folder, wished=False)


def give_away(session: Session, tenure: Tenure, process: int) -> None:
    """The guest, which stands still for good, is the backup's. Raises VmckptError: not yet."""
    tenure.hand_over(session.peer)
    kill(process)


def kill(process: int, limit: Seconds = _ENDS) -> None:
    """End a QEMU at once, and wait until it is gone."""
    try:
        file = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(file, signal.SIGKILL)
        select.select([file], [], [], limit)
    finally:
        os.close(file)


def switched(session: Session, folder: Path) -> None:
    """After a planned switch. Raises VmckptError."""
    (folder / guard.OVER).touch()
    _end_writes(session, folder, None)
    outcome(folder, "switched", f"the guest runs on {session.peer}")


def forget(session: Session, folder: Path) -> None:
    """Remove what a protection left whose guest runs here no more. Raises VmckptError."""
    _end_writes(session, folder, None)
    shutil.rmtree(folder, ignore_errors=True)


def outcome(folder: Path, what: str, why: str) -> None:
    """Leave word of how it ended, for the controller."""
    new = folder / f"{OUTCOME}.new"
    new.write_text(json.dumps({"outcome": what, "why": why, "at": time.time()}))
    new.rename(folder / OUTCOME)


def _token(folder: Path) -> int:
    return int((folder / "token").read_text())


def _hand_over(session: Session, folder: Path) -> None:
    """A guest that is dead for sure need not be waited for."""
    if session.lease is None or not session.terms.automatic:
        return
    if userfault.find_process(session.guest) is not None:
        return
    client = LeaseClient(session.lease.url, holder=session.host, limit=session.lease.terms.limit)
    try:
        client.hand_over(_token(folder), session.peer)
    finally:
        client.close()


def _release(session: Session, folder: Path) -> None:
    if session.lease is None:
        return
    client = LeaseClient(session.lease.url, holder=session.host, limit=session.lease.terms.limit)
    try:
        client.release(_token(folder))
    finally:
        client.close()


def _tell_backup(session: Session, folder: Path, why: str) -> None:
    made = link.connect(folder, (session.address, session.port), limit=_CONNECT)
    token = _token(folder) if session.lease is not None else 1
    with Line(made, lambda: token, takes=lambda told: told <= token) as line:
        line.send(Hello(session=session.session, captured=1))
        line.send(End(why=why))
        line.receive(_CONNECT)
