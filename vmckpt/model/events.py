"""What an operation tells while it runs. One stream; every front end draws from it."""

from dataclasses import dataclass

from vmckpt.model.findings import Finding
from vmckpt.model.jobs import Decision, JobPhase, JobSample
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
