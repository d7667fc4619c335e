"""Room on a host for what a snapshot lays down there: looked at before, and watched meanwhile.

The file system may be that of guests' images, and a full one stops all of them.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vmckpt.capture.migration_settings import Commands
from vmckpt.errors import CaptureFailed, QemuUnclear
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.units import GIB, Bytes, Seconds, show_bytes

RESERVE = Bytes(GIB)
"""What stays free for everybody else."""
_EVERY = Seconds(0.5)
_HELD = re.compile(r"^(?:VmRSS|VmSwap|HugetlbPages):\s+(\d+) kB", re.MULTILINE)
_MEND = "make room there, or name another folder with agent_state in hosts.yaml"


def resident_memory(status: str) -> Bytes:
    """What a process has of memory, from its /proc/PID/status. Pure."""
    return Bytes(sum(int(kib) << 10 for kib in _HELD.findall(status)))


def memory(monitor: Commands) -> Bytes:
    """How much an image of a guest's memory takes at most: pages never touched are holes in it."""
    told: Mapping[str, Any] = monitor.ask("query-memory-size-summary")
    whole = int(told["base-memory"]) + int(told.get("plugged-memory", 0))
    try:
        process = identity.hold(monitor.guest)
        if process is None:
            return Bytes(whole)
        with process:
            return Bytes(
                min(whole, resident_memory(Path(f"/proc/{process.pid}/status").read_text()))
            )
    except (OSError, QemuUnclear):
        return Bytes(whole)


def free(folder: Path) -> Bytes:
    """In a folder's file system. Raises OSError."""
    stat = os.statvfs(folder)
    return Bytes(stat.f_bavail * stat.f_frsize)


def require_space(folder: Path, wanted: Bytes) -> None:
    """Raises CaptureFailed if there is no room for so much, and OSError."""
    there = free(folder)
    if there < wanted + RESERVE:
        raise CaptureFailed(
            f"{folder} has {show_bytes(there)} free; the snapshot may take {show_bytes(wanted)}"
            f" there, and {show_bytes(RESERVE)} must stay free for others: nothing was captured",
            hint=_MEND,
        )


class Watch:
    """Looks now and then whether others have room still."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._looked = clock()

    def look(self) -> None:
        """To be called over and over. Raises CaptureFailed, once half of the reserve is gone."""
        now = self._clock()
        if now - self._looked < _EVERY:
            return
        self._looked = now
        there = free(self._folder)
        if there < RESERVE // 2:
            raise CaptureFailed(
                f"{self._folder} has only {show_bytes(there)} free: the snapshot was given up"
                " before other programs there stop",
                hint=_MEND,
            )
