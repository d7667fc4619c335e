"""What the agent and its watchdog tell each other: one page of memory, as a file on tmpfs.

Each value is eight bytes at a multiple of eight and is written and read by one instruction
(`memoryview.cast` copies an item of eight bytes, which compilers make one load or store), so
nobody sees half of one; and no two must be seen together: a process's number and its start are one
value. The watchdog locks the page in memory. It must not be removed or cut while either uses it.
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Self

from vmckpt.units import Seconds

SIZE = 4096
MAGIC = 0x564D434B47415244
"""Of version 1."""
_MAGIC, _RENEWED, _LASTS, _STOPPED, _PROCESS, _BEATS, _GUARDED, _SPARED = range(8)
# A process's number has at most 22 bits; its start, in ticks of 10 ms, fits the rest for ages.
_PID_BITS = 22


def identity(process: int) -> int:
    """A process's number and start in one: never another's. Raises ProcessLookupError."""
    try:
        told = Path(f"/proc/{process}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"there is no process {process}") from None
    ticks = int(told.rpartition(b")")[2].split()[19])
    return ticks << _PID_BITS | process


def process_of(identity: int) -> int:
    """The number alone."""
    return identity & (1 << _PID_BITS) - 1


class WatchdogPage:
    """The page, mapped. Use `create` once per protection, `open` ever after; then `close`."""

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, SIZE)
        self._times = memoryview(self._map).cast("d")
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, path: Path, *, lasts: Seconds) -> Self:
        """A new page, no lease enforced. Raises OSError; FileExistsError if there is one."""
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
        """Raises OSError, and ValueError if it is no such page."""
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(file).st_size != SIZE:
                raise ValueError(f"{path} is no watchdog's page")
            page = cls(file)
        finally:
            os.close(file)
        if page._words[_MAGIC] != MAGIC:
            page.close()
            raise ValueError(f"{path} is no watchdog's page of this version")
        return page

    def close(self) -> None:
        self._times.release()
        self._words.release()
        self._map.close()

    @property
    def renewed(self) -> float:
        """When the last renewal that succeeded was sent; 0: no lease is enforced."""
        return self._times[_RENEWED]

    @renewed.setter
    def renewed(self, sent: float) -> None:
        self._times[_RENEWED] = sent

    def lose(self) -> None:
        """The lease is lost: the watchdog kills the guest at its next turn."""
        self.renewed = float("-inf")

    @property
    def lasts(self) -> float:
        """How long a renewal is good, from when it was sent."""
        return self._times[_LASTS]

    @lasts.setter
    def lasts(self, time: float) -> None:
        self._times[_LASTS] = time

    @property
    def stopped(self) -> float:
        """Since when the guest stands still for an epoch; 0: it does not."""
        return self._times[_STOPPED]

    @stopped.setter
    def stopped(self, since: float) -> None:
        self._times[_STOPPED] = since

    @property
    def agent(self) -> int:
        """The agent's `identity`; 0: none has come yet."""
        return self._words[_PROCESS]

    @agent.setter
    def agent(self, identity: int) -> None:
        self._words[_PROCESS] = identity

    @property
    def beats(self) -> int:
        """The agent's heartbeats. An agent that has begun to count and stops is taken for hung."""
        return self._words[_BEATS]

    def beat(self) -> None:
        """For one process at a time: the agent."""
        self._words[_BEATS] = (self._words[_BEATS] + 1) % (1 << 64)

    @property
    def guarded(self) -> float:
        """When the watchdog last looked; 0: never. If not, the agent starts another."""
        return self._times[_GUARDED]

    @guarded.setter
    def guarded(self, now: float) -> None:
        self._times[_GUARDED] = now

    @property
    def spared(self) -> float:
        """When the spare watchdog of a pair last looked; 0: never."""
        return self._times[_SPARED]

    @spared.setter
    def spared(self, now: float) -> None:
        self._times[_SPARED] = now
