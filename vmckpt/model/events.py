"""What an operation reports while it runs, and the callers and commands that it runs for.

One stream of events; every front end is fed from it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from vmckpt.model.finding import Finding
from vmckpt.model.migration import Decision, JobPhase, JobSample
from vmckpt.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How long a migration will still take, as a range."""

    low: Seconds | None
    """None: nothing can be said yet."""
    high: Seconds | None
    """None: no upper bound is known."""
    converging: bool | None
    """None: not known before the second pass over memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged:
    phase: JobPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Preflight is done."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    sample: JobSample
    estimate: Estimate
    done: float
    """Share of the work that is done, 0 to 1; never goes down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """How far a snapshot is."""

    phase: str
    """"capture" or "store"."""
    done: Bytes
    total: Bytes | None
    """None: not known."""
    new: Bytes
    """Of that, what the snapshot before did not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnItsWay:
    """A guest that a job of a whole host moves."""

    guest: str
    target: str
    sampled: Sampled | None
    """How far its migration is; None: it has ended, however it did."""


Event = PhaseChanged | Checked | Sampled | Decided | Copied | OnItsWay


Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whoever gave the order: is told what happens, and may stop it."""

    emit: Emit
    warn: Callable[[str], None]
    """Told from any thread what does not stop the work."""
    stop: asyncio.Event
    turn: Callable[[], Coroutine[object, object, None]] | None = None
    """Waited for when all is looked at and before anything is changed, where several go one after
    the other; raises Cancelled if it does not come. None: it is its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a command has printed, and how it ended."""

    text: str
    code: int | None
    """Its exit code; None: it runs."""


class Begun(Protocol):
    """A command that was started."""

    words: tuple[str, ...]
    pid: int

    def said(self) -> Said:
        """Up to now."""

    def stop(self) -> None:
        """As Ctrl-C does."""


class Commands(Protocol):
    """Runs commands."""

    async def ask(self, words: Sequence[str], width: int) -> Said:
        """One that only looks: wait for its end. Cancelled, it is ended."""

    def start(self, words: Sequence[str], width: int) -> Begun:
        """One that acts."""
