"""Keep a protected guest's clock correct through its guest agent, if the guest has an agent."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from vmckpt.errors import VmckptError
from vmckpt.hypervisor.guest_agent import GuestAgent
from vmckpt.hypervisor.qmp import DomainCaller, QmpMonitor
from vmckpt.replication import guest_clock
from vmckpt.replication.guest_clock import Clock, Reading
from vmckpt.replication.session import Session
from vmckpt.replication.status import PrimaryStatus
from vmckpt.units import Seconds
from vmckpt.util import atomic_file

EVERY = Seconds(10.0)
_FILE = "clock.json"


class ClockKeeper:
    """Checks the guest's clock immediately, and then every ten seconds.

    Use as `with ClockKeeper(session, folder, status)`. The checks use a separate thread and
    libvirt connection, since a guest agent may hang.
    """

    def __init__(self, session: Session, folder: Path, status: PrimaryStatus) -> None:
        self._session, self._file, self._status = session, folder / _FILE, status
        self._over = threading.Event()
        self._paused = Seconds(0.0)
        self._thread = threading.Thread(target=self._run, name="clock", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread is not joined, since a call to the guest agent may take a long time.
        self._over.set()

    def _run(self) -> None:
        session = self._session
        while not self._over.is_set():
            with (
                suppress(VmckptError, OSError),
                QmpMonitor(session.guest, host=session.host, uri=session.uri) as monitor,
            ):
                self._look(monitor)
            self._over.wait(EVERY)

    def _look(self, caller: DomainCaller) -> None:
        agent = GuestAgent(caller)
        if not agent.there():
            return
        paused = self._status.paused
        since, self._paused = Seconds(paused - self._paused), paused
        found = guest_clock.decide(self._known(), read(agent, since))
        if found.put_right:
            set_ahead(agent, found.clock.usual)
        told = {"usual": found.clock.usual, "corrected": found.clock.corrected}
        atomic_file.put(self._file, json.dumps(told))
        self._status.clock(found.clock)

    def _known(self) -> Clock | None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            told = json.loads(self._file.read_text())
            return Clock(usual=Seconds(told["usual"]), corrected=int(told["corrected"]))
        return None


def read(agent: GuestAgent, paused: Seconds) -> Reading:
    """Read the guest's clock. `paused`: how long the guest was paused since the last reading.

    Raises HypervisorError.
    """
    before = time.time()
    told = agent.time()
    after = time.time()
    doubt = Seconds((after - before) / 2)
    return Reading(ahead=Seconds(told - before - doubt), doubt=doubt, paused=paused)


def set_ahead(agent: GuestAgent, ahead: Seconds) -> None:
    """Set the guest's clock to the host's time plus `ahead`. Raises HypervisorError."""
    agent.set_time(Seconds(time.time() + ahead))
