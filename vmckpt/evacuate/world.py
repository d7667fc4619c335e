"""What a run that moves guests acts on, and what comes of it."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol

from vmckpt.evacuate.ahead import Turn
from vmckpt.evacuate.course import Blame
from vmckpt.evacuate.placement import Left
from vmckpt.evacuate.seen import Known, Seen
from vmckpt.units import BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What came of one move."""

    good: bool
    why: str = ""
    """Why not."""
    blame: Blame = Blame.TARGET
    final: str = ""
    """What somebody has to do about it: it is not tried again; empty: it may be."""
    job: str | None = None
    took: Seconds = Seconds(0.0)
    downtime: Seconds | None = None


class World(Protocol):
    """What a run acts on."""

    async def look(self) -> Seen:
        """What is true now. Raises VmckptError only for what looking again does not mend."""

    async def move(self, known: Known, target: str, turn: Turn) -> Moved:
        """Make a move ready, and carry it out when its turn comes; returns however it ends."""

    def nearing(self) -> Container[str]:
        """Guests on their way that are expected to arrive within seconds, by name."""

    def streams(self) -> Mapping[str, BytesPerSecond]:
        """What those of guests on their way carry so far, by name; without those that have told
        nothing yet."""

    async def stop(self, known: Known) -> str | None:
        """Shut a guest down, or suspend it; why that did not come about, None: it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A guest that was moved."""

    guest: str
    uuid: str
    source: str
    target: str
    job: str | None
    took: Seconds
    downtime: Seconds | None
    standby: bool = False
    """It was not the guest itself, which runs elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    arrived: tuple[Arrived, ...]
    shut_down: tuple[str, ...]
    """UUIDs."""
    left: tuple[Left, ...]
    stopped: bool
    took: Seconds
