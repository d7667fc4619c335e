"""Events that an operation emits while it is running; interfaces of callers and commands.

All front ends receive the same stream of events.
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
    """A range for the remaining time of a migration."""

    low: Seconds | None
    """The shortest remaining time; None: not known yet."""
    high: Seconds | None
    """The longest remaining time; None: no upper bound is known."""
    converging: bool | None
    """Whether the migration converges; None: unknown, as before the second pass over memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged:
    """A migration has entered a phase."""

    phase: JobPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Preflight has finished."""

    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Progress of a migration."""

    sample: JobSample
    estimate: Estimate
    done: float
    """Fraction of the work that is done, 0 to 1; it never decreases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision was made by the policy, a limit or an operator."""

    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Progress of a snapshot."""

    phase: str
    """What is being done: "capture", "store", "copy", "export", …"""
    done: Bytes
    total: Bytes | None
    """The total number of bytes; None: unknown."""
    new: Bytes
    """Bytes of `done` that the previous snapshot did not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnItsWay:
    """Progress of a guest that is moved by a job for an entire host."""

    guest: str
    target: str
    sampled: Sampled | None
    """Progress of the migration; None: the migration has ended, successfully or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """A piece of work of the service for schedules failed, and will be retried."""

    key: str
    """Identifies the work; equal for its retries."""
    work: str
    """Description of the work, such as "snapshot of web1 (nightly) into near"."""
    guest: str | None
    why: str
    times: int
    """Number of consecutive failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """A piece of work succeeded after it had failed."""

    key: str
    work: str


Event = PhaseChanged | Checked | Sampled | Decided | Copied | OnItsWay | WorkFailed | WorkDone


Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of an operation, such as a command: receives its events and can stop it."""

    emit: Emit
    warn: Callable[[str], None]
    """Called with each warning, from any thread."""
    stop: asyncio.Event
    """Set to stop the operation."""
    turn: Callable[[], Coroutine[object, object, None]] | None = None
    """Awaited after all checks and before the first change, so that operations run one after the
    other. Raises Cancelled if the operation must not begin. None: the operation need not wait.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The output of a command, and its exit code."""

    text: str
    code: int | None
    """The exit code; None: the command is still running."""


class Begun(Protocol):
    """A command that was started."""

    words: tuple[str, ...]
    pid: int

    def said(self) -> Said:
        """Return the command's output so far, and its exit code."""

    def stop(self) -> None:
        """Stop the command, as Ctrl-C does."""


class Commands(Protocol):
    """Runs commands of vmckpt for a front end. `width`: columns of their output."""

    async def ask(self, words: Sequence[str], width: int) -> Said:
        """Run a command that changes nothing, and wait for it. If cancelled, stop the command."""

    def start(self, words: Sequence[str], width: int) -> Begun:
        """Start a command that changes something, and return immediately."""
