"""Busy processors, and an agent that is struck in the middle of an epoch's pause."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.lab.bench import Bench
from tests.lab.protecting import LEFT, SOON, agent
from vmckpt.lease.clock import boottime
from vmckpt.replication.watchdog.process import LOG
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt_lab import host
from vmckpt_lab.faults import inject
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.processes import Census

LOAD = 16
_SPIN = "import os\nos.setpriority(os.PRIO_PROCESS, 0, 0)\nwhile True: pass"


@contextmanager
def busy(loops: int = LOAD) -> Iterator[None]:
    """So many processes of ordinary priority that want a processor each.

    Each in a session of its own: together in one they would get no more than one process does,
    where the kernel groups processes by session.
    """
    running = [
        subprocess.Popen([sys.executable, "-c", _SPIN], start_new_session=True)
        for _ in range(loops)
    ]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """What one agent's end has cost; in seconds."""

    paused: float
    """From the guest's stop until the watchdog, or an agent, had resumed it."""
    still: float
    """The longest time in which the guest's CPUs did nothing, as the kernel counts it."""
    renewed: float | None
    """From the stroke until the lease was renewed again; None: it has none, or ended."""


class Victim:
    """The protection of the lab's only guest, on alpha."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        first = host.first_process(bench.plan.host("alpha"))
        (path,) = Path(f"/proc/{first}/root{LEFT}").glob("*/page")
        self._folder = path.parent
        self.page = WatchdogPage.open(path)
        found = inject.qemu(bench.plan, "web1", "alpha")
        assert found is not None
        self._copy, self._census = found, Census(bench.plan)

    def log(self) -> list[str]:
        """What the watchdog has written down."""
        return (self._folder / LOG).read_text().splitlines()

    def strike(self, number: signal.Signals, limit: float = SOON) -> Struck:
        """Kill or stop the agent in the middle of a pause, and wait until the guest runs on."""
        process = self._stopped_in_a_pause(limit)
        since, renewed = self.page.stopped, self.page.renewed
        struck = boottime()
        os.kill(process, number)
        paused, still = self._resumed(since, limit)
        again = self._renewed(renewed, struck, limit) if renewed else None
        return Struck(paused=paused, still=still, renewed=again)

    def _stopped_in_a_pause(self, limit: float) -> int:
        """The agent's process, which stands still while the guest does."""
        give_up = Deadline(limit)
        process = agent(self._bench, "alpha")
        while True:
            assert not give_up.passed(), "the guest is never paused"
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.002)  # its threads stop one by one
            # In the first milliseconds QEMU may not have been told yet, nor in the last any more.
            if self.page.stopped and self._stands():
                return process
            os.kill(process, signal.SIGCONT)
            time.sleep(0.0137)

    def _stands(self) -> bool:
        """Whether the guest's CPUs do nothing."""
        before = self._census.ran(self._copy)
        time.sleep(0.05)
        return self._census.ran(self._copy) == before

    def _resumed(self, since: float, limit: float) -> tuple[float, float]:
        give_up = Deadline(limit)
        ran, moved = self._census.ran(self._copy), since
        still = 0.0
        while True:
            assert not give_up.passed(), "the guest does not run again"
            time.sleep(0.005)
            now, runs = boottime(), self._census.ran(self._copy)
            if runs != ran:
                still, moved, ran = max(still, now - moved), now, runs
            if self.page.stopped != since and still:
                return now - since, still

    def _renewed(self, last: float, struck: float, limit: float) -> float | None:
        give_up = Deadline(limit)
        while self.page.renewed == last:
            if give_up.passed() or inject.qemu(self._bench.plan, "web1", "alpha") is None:
                return None
            time.sleep(0.01)
        return boottime() - struck

    def close(self) -> None:
        with suppress(BufferError):
            self.page.close()
