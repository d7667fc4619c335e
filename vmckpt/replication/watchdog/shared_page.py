"""The page of memory that the agent and its watchdog share, a file on tmpfs.

Each value is eight aligned bytes, written and read by one instruction: `memoryview.cast` copies an
item of eight bytes, and compilers use one load or store for this. So no process sees a partly
written value. No two values need to be consistent with each other: a process's ID and start time
are one value. Times are in seconds of CLOCK_BOOTTIME. The watchdog locks the page in memory. The
file must not be removed or truncated while it is in use.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Self

from vmckpt.units import Seconds

SIZE = 4096
MAGIC = 0x564D434B47415244
"""Identifies version 1 of the page."""
_MAGIC, _RENEWED, _LASTS, _STOPPED, _PROCESS, _BEATS, _GUARDED, _SPARED = range(8)
# A process ID has at most 22 bits; the start time, in ticks of 10 ms, fits into the other 42 bits.
_PID_BITS = 22


def identity(process: int) -> int:
    """Return a process's ID and start time as one number, which is unique on the host.

    Raises ProcessLookupError.
    """
    try:
        told = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"there is no process {process}") from None
    ticks = int(told.rpartition(b")")[2].split()[19])
    return ticks << _PID_BITS | process


def process_of(identity: int) -> int:
    """Return the process ID in an identity."""
    return identity & (1 << _PID_BITS) - 1


class WatchdogPage:
    """A mapped page. Use `create` once per protection, `open` afterwards; `close` it at the end."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, SIZE)
        self._times = memoryview(self._map).cast("d")
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, path: Path, *, lasts: Seconds) -> Self:
        """Create a page that enforces no lease. `lasts`: how long a renewal is valid.

        Raises OSError; FileExistsError if the page already exists.
        """
        first = struct.pack("=Qdd", MAGIC, 0.0, lasts).ljust(SIZE, b"\0")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(first)
        try:
            path.hardlink_to(temporary)
        finally:
            temporary.unlink()
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map an existing page. Raises OSError, and ValueError if the file is not a page."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != SIZE:
                raise ValueError(f"{path} is not a watchdog page")
            page = cls(file)
        finally:
            os.close(file)
        if page._words[_MAGIC] != MAGIC:
            page.close()
            raise ValueError(f"{path} is not a watchdog page of this version")
        return page

    def close(self) -> None:
        self._times.release()
        self._words.release()
        self._map.close()

    @property
    def renewed(self) -> float:
        """When the last successful renewal was sent.

        0: no lease is enforced; negative: the lease is lost.
        """
        return self._times[_RENEWED]

    @renewed.setter
    def renewed(self, sent: float) -> None:
        self._times[_RENEWED] = sent

    def lose(self) -> None:
        """Record that the lease is lost: the watchdog kills the guest in its next cycle."""
        self.renewed = float("-inf")

    @property
    def lasts(self) -> float:
        """How long a renewal is valid after it was sent."""
        return self._times[_LASTS]

    @lasts.setter
    def lasts(self, time: float) -> None:
        self._times[_LASTS] = time

    @property
    def stopped(self) -> float:
        """When the guest was paused for an epoch; 0: it is not paused for an epoch."""
        return self._times[_STOPPED]

    @stopped.setter
    def stopped(self, since: float) -> None:
        self._times[_STOPPED] = since

    @property
    def agent(self) -> int:
        """The agent's `identity`; 0: no agent has started to work yet."""
        return self._words[_PROCESS]

    @agent.setter
    def agent(self, identity: int) -> None:
        self._words[_PROCESS] = identity

    @property
    def beats(self) -> int:
        """The agent's heartbeat counter. If it stops after its first count, the agent is hung."""
        return self._words[_BEATS]

    def beat(self) -> None:
        """Count a heartbeat; only the agent may call this."""
        self._words[_BEATS] = (self._words[_BEATS] + 1) % (1 << 64)

    @property
    def guarded(self) -> float:
        """When the watchdog last ran a cycle; 0: never.

        If the last cycle is too long ago, the agent restarts the watchdog.
        """
        return self._times[_GUARDED]

    @guarded.setter
    def guarded(self, now: float) -> None:
        self._times[_GUARDED] = now

    @property
    def spared(self) -> float:
        """When the spare watchdog of a pair last ran a cycle; 0: never."""
        return self._times[_SPARED]

    @spared.setter
    def spared(self, now: float) -> None:
        self._times[_SPARED] = now
