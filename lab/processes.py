"""Find the QEMU processes of a lab's hosts in /proc, independently of libvirtd."""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmckpt_lab.plan import LabPlan

_GUEST = re.compile(rb"\0guest=([^,\0]+)")
_PROC = Path("/proc")
# Seconds after which a new process is assumed not to execute another program.
_SETTLED = 15.0


@dataclass(frozen=True, slots=True, order=True)
class QemuCopy:
    """A QEMU process of a guest."""

    guest: str
    host: str
    pid: int
    """Process ID as seen from outside the host."""

    def __str__(self) -> str:
        return f"{self.guest} on {self.host} (process {self.pid})"


class Census:
    """Finds the processes of a lab's hosts; cheap enough for many calls per second."""

    def __init__(self, plan: LabPlan) -> None:
        self._hosts = {
            Path("/run/netns", host.namespace).stat().st_ino: host.name for host in plan.hosts
        }
        self._threads: dict[int, list[Path]] = {}
        self._others: dict[int, float] = {}
        """When each process that is not a QEMU process was first seen, by process ID."""

    def copies(self, guest: str | None = None) -> tuple[QemuCopy, ...]:
        """Return the QEMU processes of all guests, running or paused, or of `guest` only."""
        found = []
        for pid in self._qemus():
            host = self._host_of(pid)
            with suppress(OSError):
                name = _GUEST.search((_PROC / str(pid) / "cmdline").read_bytes())
                if host is not None and name is not None and not _ended(pid):
                    found.append(QemuCopy(guest=name[1].decode(), host=host, pid=pid))
        return tuple(sorted(one for one in found if guest in (None, one.guest)))

    def daemon(self, host: str, name: str) -> int | None:
        """Return the lowest ID of the processes with this name on a host; None if there is none."""
        found = [pid for pid in self._called(name) if self._host_of(pid) == host]
        return min(found, default=None)

    def ran(self, copy: QemuCopy) -> int:
        """Return the CPU time of a copy's vCPU threads, in nanoseconds; 0 if the copy is gone.

        The vCPU threads of a paused guest use no CPU time.
        """
        if copy.pid not in self._threads:
            threads = list(_cpu_threads(copy.pid))
            if not threads:
                return 0
            self._threads[copy.pid] = threads
        total = 0
        for thread in self._threads[copy.pid]:
            try:
                total += int(thread.read_text().split()[0])
            except (OSError, IndexError):
                self._threads.pop(copy.pid, None)
                return 0
        return total

    def _qemus(self) -> list[int]:
        """Return the IDs of all QEMU processes.

        A process that was not a QEMU process for `_SETTLED` seconds is not checked again.
        """
        now, others, found = time.monotonic(), dict[int, float](), []
        with os.scandir(_PROC) as entries:
            pids = [int(entry.name) for entry in entries if entry.name.isdigit()]
        for pid in pids:
            since = self._others.get(pid)
            if since is None or now - since < _SETTLED:
                with suppress(OSError):
                    if (_PROC / str(pid) / "comm").read_text().startswith("qemu-system"):
                        found.append(pid)
                        continue
            others[pid] = now if since is None else since
        self._others = others
        return found

    def _called(self, name: str) -> Iterable[int]:
        for entry in _PROC.glob("[0-9]*"):
            with suppress(OSError):
                if (entry / "comm").read_text().startswith(name):
                    yield int(entry.name)

    def _host_of(self, pid: int) -> str | None:
        try:
            return self._hosts.get(Path(f"/proc/{pid}/ns/net").stat().st_ino)
        except OSError:
            return None


def _ended(pid: int) -> bool:
    """Return whether a process is a zombie, whose memory and threads are gone."""
    return _PROC.joinpath(str(pid), "stat").read_text().rpartition(")")[2].split()[0] in "ZXx"


def _cpu_threads(pid: int) -> Iterable[Path]:
    """Yield the schedstat file of each vCPU thread of a QEMU process."""
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            if (task / "comm").read_text().startswith(("CPU ", "ALL CPUs")):
                yield task / "schedstat"
