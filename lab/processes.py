"""The QEMU processes of a lab's hosts, read from /proc, which needs no libvirtd."""

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
# Seconds after which a new process has become what it was made for.
_SETTLED = 15.0


@dataclass(frozen=True, slots=True, order=True)
class QemuCopy:
    """A QEMU process of a guest."""

    guest: str
    host: str
    pid: int
    """As seen from outside."""

    def __str__(self) -> str:
        return f"{self.guest} on {self.host} (process {self.pid})"


class Census:
    """Finds the processes of a lab's hosts; cheap enough to be asked many times a second."""

    def __init__(self, plan: LabPlan) -> None:
        self._hosts = {
            Path("/run/netns", host.namespace).stat().st_ino: host.name for host in plan.hosts
        }
        self._threads: dict[int, list[Path]] = {}
        self._others: dict[int, float] = {}
        """Processes that are no QEMU, and when they were first seen."""

    def copies(self, guest: str | None = None) -> tuple[QemuCopy, ...]:
        """Every QEMU of a guest, running or not; of one guest if it is named."""
        found = []
        for pid in self._qemus():
            host = self._host_of(pid)
            with suppress(OSError):
                name = _GUEST.search((_PROC / str(pid) / "cmdline").read_bytes())
                if host is not None and name is not None and not _ended(pid):
                    found.append(QemuCopy(guest=name[1].decode(), host=host, pid=pid))
        return tuple(sorted(one for one in found if guest in (None, one.guest)))

    def daemon(self, host: str, name: str) -> int | None:
        """The oldest process of that name on a host."""
        found = [pid for pid in self._called(name) if self._host_of(pid) == host]
        return min(found, default=None)

    def ran(self, copy: QemuCopy) -> int:
        """Nanoseconds of CPU time that the guest's CPUs had in that process; 0 if it is gone.

        A stopped guest's CPU threads use none at all.
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
        """A process that was something else for a while does not become a QEMU: it is not read."""
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
    """Whether it is a zombie: its memory and its threads are gone."""
    return _PROC.joinpath(str(pid), "stat").read_text().rpartition(")")[2].split()[0] in "ZXx"


def _cpu_threads(pid: int) -> Iterable[Path]:
    """Where the kernel counts the time of each of a QEMU's CPU threads."""
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            if (task / "comm").read_text().startswith(("CPU ", "ALL CPUs")):
                yield task / "schedstat"
