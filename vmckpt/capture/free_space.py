"""Check the free space for a snapshot's temporary files, before the capture and during it.

The file system may also hold guests' images; if it becomes full, all these guests are paused.
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
"""Space that must stay free for other programs."""
_EVERY = Seconds(0.5)
_HELD = re.compile(r"^(?:VmRSS|VmSwap|HugetlbPages):\s+(\d+) kB", re.MULTILINE)
_MEND = "free some space there, or set agent_state in hosts.yaml to another directory"


def resident_memory(status: str) -> Bytes:
    """Return the resident and swapped bytes of a process, from its /proc/PID/status. Pure."""
    return Bytes(sum(int(kib) << 10 for kib in _HELD.findall(status)))


def memory(monitor: Commands) -> Bytes:
    """Return the maximum size of an image of the guest's memory, in bytes.

    Pages that were never touched are counted only if QEMU's process cannot be examined. Raises
    HypervisorError.
    """
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
    """Return the free bytes on a directory's file system. Raises OSError."""
    stat = os.statvfs(folder)
    return Bytes(stat.f_bavail * stat.f_frsize)


def require_space(folder: Path, wanted: Bytes) -> None:
    """Check that a directory's file system has space for `wanted` bytes and the reserve.

    Raises CaptureFailed, OSError.
    """
    there = free(folder)
    if there < wanted + RESERVE:
        raise CaptureFailed(
            f"{folder} has {show_bytes(there)} free; the snapshot may need {show_bytes(wanted)},"
            f" and {show_bytes(RESERVE)} must stay free for other programs; nothing was captured",
            hint=_MEND,
        )


class Watch:
    """Checks the free space while a snapshot is taken."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._looked = clock()

    def look(self) -> None:
        """Check the free space, at most every 0.5 s. Call this often.

        Raises CaptureFailed once less than half of the reserve is free, and OSError.
        """
        now = self._clock()
        if now - self._looked < _EVERY:
            return
        self._looked = now
        there = free(self._folder)
        if there < RESERVE // 2:
            raise CaptureFailed(
                f"{self._folder} has only {show_bytes(there)} free; the snapshot was cancelled to"
                " leave space for other programs",
                hint=_MEND,
            )
