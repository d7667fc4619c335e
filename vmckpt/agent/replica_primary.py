"""The primary's agent: puts together what an epoch needs, and takes it apart in the end."""

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vmckpt.agent import afterlife, guarded
from vmckpt.checkpoint import guestmemory, settings, userfault
from vmckpt.checkpoint.settings import Undo
from vmckpt.errors import CannotCapture, VmckptError
from vmckpt.hypervisor import standby as libvirt_side
from vmckpt.hypervisor.endings import Ending, Endings
from vmckpt.hypervisor.monitor import Monitor
from vmckpt.replicate import buffers, logserver, mirroring
from vmckpt.replicate.buffers import Buffers
from vmckpt.replicate.capture import Capturer
from vmckpt.replicate.control import Control
from vmckpt.replicate.diskepochs import LogPlace, WriteLog
from vmckpt.replicate.facts import Session
from vmckpt.replicate.finder import CompareFinder
from vmckpt.replicate.guardpage import GuardPage, boottime
from vmckpt.replicate.logserver import Socket
from vmckpt.replicate.memory import Memory
from vmckpt.replicate.primary import Parts, Primary, Switched
from vmckpt.replicate.status import PrimaryStatus
from vmckpt.replicate.tenure import Tenure
from vmckpt.replicate.wishes import Wish, Wishes
from vmckpt.units import MIB, Bytes, Seconds

log = logging.getLogger("vmckpt.replica")

_LOG_LIMIT = Bytes(64 * MIB)
_ASIDE = 64 * MIB >> 12
"""Pages of an epoch that are kept to send differences of."""
_TELLS = Seconds(2.0)


def run_primary(session: Session, folder: Path, wishes: Wishes) -> None:
    """Until the protection ends, or the guest does. Raises VmckptError: to be started again."""
    process = userfault.find_process(session.guest)
    if process is None:
        afterlife.guest_died(session, folder)
        return
    page = guarded.begin(session, folder, process)
    status = PrimaryStatus()
    endings = Endings(session.guest, uri=session.uri)
    try:
        with ExitStack() as stack:
            stack.enter_context(Control(folder, _Answers(session, status, wishes)))
            stack.enter_context(endings)
            monitor = stack.enter_context(
                Monitor(session.guest, host=session.host, uri=session.uri)
            )
            tenure = stack.enter_context(
                Tenure(
                    session.lease,
                    folder,
                    page,
                    holder=session.host,
                    note=status.as_json,
                    lives=lambda: Path(f"/proc/{process}").exists(),
                )
            )
            parts = _parts(session, folder, monitor, page, tenure, status, wishes, stack)
            try:
                Primary(session, folder, parts).run()
            except Switched:
                afterlife.switched(session, folder)
                return
            afterlife.unprotect(session, folder, monitor, tenure)
    except VmckptError:
        if userfault.find_process(session.guest) is not None:
            raise
        wished = endings.how(_TELLS) is Ending.WISHED
        afterlife.guest_ended(session, folder, wished=wished)


def _parts(  # noqa: PLR0917
    session: Session, folder: Path, monitor: Monitor, page: GuardPage, tenure: Tenure,
    status: PrimaryStatus, wishes: Wishes, stack: ExitStack,
) -> Parts:  # fmt: skip
    undo = Undo.from_json(session.undo)
    if page.stopped:
        # The agent before us died in the middle of an epoch.
        settings.break_off(monitor, undo)
        page.stopped = 0.0
    settings.set_bandwidth(monitor, settings.NO_LIMIT)
    process = userfault.find_process(session.guest)
    if process is None:
        raise CannotCapture(f"{session.name} has ended")
    memory = Memory(guestmemory.files(monitor, process), folder, stack)
    finder = stack.enter_context(CompareFinder(memory.live, memory.last, most=_ASIDE))
    places = [place_of(folder, number)[0] for number in range(len(session.disks))]
    fresh = any(logserver.running(place) is None for place in places)
    logs = [stack.enter_context(one) for one in _logs(session, folder, monitor)]
    held = Buffers(monitor, session.cards, folder, session.owner)
    if buffers.there(monitor, session.cards):
        held.attach()
    else:
        fresh = True
        buffers.remove(monitor, session.cards)
        held.add()
    libvirt_side.undefine(monitor)

    def still(on: bool) -> None:
        page.stopped = boottime() if on else 0.0

    capturer = Capturer(monitor, undo, finder=finder, output=held, logs=logs, still=still)
    return Parts(
        monitor=monitor, memory=memory, finder=finder, capturer=capturer, logs=logs, buffers=held,
        tenure=tenure, wishes=wishes, status=status, fresh=fresh,
        switch=lambda: afterlife.give_away(session, tenure, process),
    )  # fmt: skip


def place_of(folder: Path, disk: int) -> tuple[LogPlace, Path]:
    """Where the log of a disk's writes is, and the socket that QEMU writes to."""
    return LogPlace(folder=folder / "writes", disk=disk), folder / "nbd" / f"{disk}.sock"


def _logs(session: Session, folder: Path, monitor: Monitor) -> list[WriteLog]:
    """Those of all disks, with QEMU writing to them."""
    nodes: Mapping[str, str] = session.extra["nodes"]
    found = []
    for number, disk in enumerate(session.disks):
        place, path = place_of(folder, number)
        socket = Socket(path=path, owner=session.owner)
        job = mirroring.name_of(number)
        if logserver.running(place) is None:
            mirroring.end(monitor, job)
        logserver.start(place, socket, size=Bytes(disk.size), limit=_LOG_LIMIT)
        mirroring.begin(monitor, node=nodes[disk.target], socket=path, job=job, full=True)
        found.append(WriteLog(place))
        found[-1].set_open(False)
    return found


class _Answers:
    """What the control socket answers."""

    def __init__(self, session: Session, status: PrimaryStatus, wishes: Wishes) -> None:
        self._session, self._status, self._wishes = session, status, wishes

    def __call__(self, told: Mapping[str, Any]) -> dict[str, Any]:
        wish = told.get("wish")
        if wish in (Wish.END, Wish.PLANNED):
            self._wishes.add(Wish(str(wish)))
        elif wish is not None:
            return {"error": f"the primary cannot {wish}"}
        return {
            "guest": self._session.guest, "name": self._session.name, "host": self._session.host,
            "peer": self._session.peer, "session": self._session.session, "process": os.getpid(),
            **self._status.as_json(),
        }  # fmt: skip
