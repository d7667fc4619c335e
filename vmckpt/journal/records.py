"""The records in the journal, as immutable dataclasses, and their JSON form. Pure.

The times of an operation are in seconds since 1970 (UTC). The times of its events and samples are
in seconds since the operation began.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, TypedDict

from vmckpt.model.migration import Outcome
from vmckpt.units import Seconds

_NOTHING: Mapping[str, Any] = MappingProxyType({})


MAINTENANCE = "maintenance"
"""The kind of operation that keeps guests off a host until an operator ends the maintenance."""

MIGRATE = "migrate"
"""The kind of operation that migrates one guest."""

FORGOTTEN = "forgotten_by"
"""Report key of an operation that an operator ended by hand. The value names the operator."""

WHOLE_HOST = ("evacuate", "repopulate", "balance")
"""Kinds of operations on a host and all its guests."""


class State(StrEnum):
    """Whether an operation is running, is waiting or has ended. A running operation has a phase."""

    RUNNING = "running"
    WAITING = "waiting"
    """The operation is waiting for its turn, or for the next attempt."""
    ENDED = "ended"


class RequestKind(StrEnum):
    """The requests that can be sent to a running operation, and their arguments."""

    BANDWIDTH = "bandwidth"
    """Change the bandwidth limit: {"bytes_per_second": number or null}; null: no limit."""
    MAX_DOWNTIME = "max-downtime"
    """Change the maximum downtime: {"seconds": number}."""
    POSTCOPY = "postcopy"
    CANCEL = "cancel"
    PAUSE = "pause"
    GO_ON = "go-on"
    """Continue a paused job."""


class StepState(StrEnum):
    """The state of a step. A step in state INTENDED may or may not have been done."""

    INTENDED = "intended"
    DONE = "done"
    UNDONE = "undone"
    """The step was done, completely or in part, and was reverted."""
    FAILED = "failed"
    """The step failed and changed nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerIdentity:
    """The unambiguous identity of the process that controls an operation."""

    host: str
    boot: str
    """The kernel's boot ID; "": the operation needs no controller (see `entrusted`)."""
    pid: int
    started: int
    """Clock ticks from boot to the process's start."""

    @property
    def entrusted(self) -> bool:
        """Whether the operation is delegated to agents on hosts and needs no controller."""
        return not self.boot


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """A new operation that has no ID yet."""

    kind: str
    """"migrate", …; the job's ID starts with the first letter of the kind."""
    guest: str
    guest_uuid: str | None = None
    source: str | None = None
    target: str | None = None
    policy: str | None = None
    mode: str | None = None
    detail: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What was requested, as JSON types."""


class Changes(TypedDict, total=False):
    """Fields of an operation that may change while the operation is running."""

    guest: str
    guest_uuid: str
    source: str
    target: str
    policy: str
    mode: str
    state: str
    phase: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation as recorded in the journal."""

    id: str
    kind: str
    guest: str
    guest_uuid: str | None
    source: str | None
    target: str | None
    policy: str | None
    mode: str | None
    state: str
    phase: str | None
    outcome: str | None
    """How the operation ended; None: it has not ended."""
    asked_by: str
    """The user that started the operation, as user@host."""
    asked_from: str | None
    """The address or terminal from which the operation was started."""
    controller: ControllerIdentity
    began_at: float
    ended_at: float | None
    detail: Mapping[str, Any]
    report: Mapping[str, Any] | None
    """The final report, as printed by the command, without the samples."""
    alive_until: float | None = None
    """When the controller's last heartbeat expires, by the journal's clock; None: no heartbeat."""

    @property
    def way(self) -> str:
        """The text "source → target", or the operation's kind and host."""
        if self.target is None and self.kind != MIGRATE:
            return f"{self.kind} on {self.source or '?'}"
        return f"{self.source or '?'} → {self.target or '?'}"

    @property
    def active(self) -> bool:
        return self.ended_at is None

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "job": self.id,
            "kind": self.kind,
            "guest": self.guest,
            "guest_uuid": self.guest_uuid,
            "source": self.source,
            "target": self.target,
            "policy": self.policy,
            "mode": self.mode,
            "state": self.state,
            "phase": self.phase,
            "outcome": self.outcome,
            "asked_by": self.asked_by,
            "asked_from": self.asked_from,
            "controller": {"host": self.controller.host, "pid": self.controller.pid},
            "began": utc(self.began_at),
            "ended": utc(self.ended_at),
            "detail": dict(self.detail),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """An event or a sample to be written to the journal."""

    kind: str
    at: Seconds
    """Seconds since the operation began."""
    values: Mapping[str, Any]
    """Values of JSON types, in the same units as the output of `--json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """An event of an operation."""

    seq: int
    at: Seconds
    kind: str
    values: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"at_ms": _ms(self.at), "kind": self.kind, **self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """A sample of an operation's progress."""

    seq: int
    at: Seconds
    values: Mapping[str, Any]

    @property
    def done(self) -> float:
        """Fraction of the work that is done, 0 to 1."""
        return float(self.values.get("done") or 0.0)

    def as_json(self) -> dict[str, Any]:
        return {"at_ms": _ms(self.at), **self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """A step in which an operation changes something. A step is recorded before it is tried."""

    seq: int
    name: str
    intent: Mapping[str, Any]
    state: StepState
    result: Mapping[str, Any] | None
    """The result of the step; None: no result is recorded."""
    began_at: float
    ended_at: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "step": self.seq,
            "name": self.name,
            "intent": dict(self.intent),
            "state": str(self.state),
            "result": None if self.result is None else dict(self.result),
            "began": utc(self.began_at),
            "ended": utc(self.ended_at),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForecast:
    """A forecast of an operation."""

    made_at: float
    values: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"made": utc(self.made_at), **self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to a running operation from another terminal."""

    id: int
    operation: str
    kind: str
    arguments: Mapping[str, Any]
    asked_by: str
    asked_at: float
    taken_at: float | None
    """When the controller took the request; None: not taken yet."""
    answered_at: float | None
    ok: bool | None
    """Whether the request was carried out; None: not answered yet."""
    answer: str | None

    def as_json(self) -> dict[str, Any]:
        return {
            "request": self.kind,
            "arguments": dict(self.arguments),
            "asked_by": self.asked_by,
            "asked": utc(self.asked_at),
            "answered": utc(self.answered_at),
            "ok": self.ok,
            "answer": self.answer,
        }


@dataclass(slots=True, kw_only=True)
class Batch:
    """Changes to an operation that are written in one transaction."""

    changes: Changes = field(default_factory=Changes)
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    forecasts: list[StoredForecast] = field(default_factory=list)
    answers: list[tuple[int, bool, str]] = field(default_factory=list)
    """A request's ID, whether it was carried out, and the answer's text."""
    ending: tuple[str, Mapping[str, Any] | None] | None = None
    """The operation's outcome and report, if the operation has ended."""

    def __bool__(self) -> bool:
        return bool(
            self.changes
            or self.events
            or self.samples
            or self.forecasts
            or self.answers
            or self.ending
        )

    def then(self, later: "Batch") -> "Batch":
        """Return a batch that contains this batch's changes, followed by those of `later`."""
        return Batch(
            changes={**self.changes, **later.changes},
            events=self.events + later.events,
            samples=self.samples + later.samples,
            forecasts=self.forecasts + later.forecasts,
            answers=self.answers + later.answers,
            ending=later.ending or self.ending,
        )


_STAYED = (
    Outcome.CANCELLED, Outcome.TIMED_OUT, Outcome.NOT_CONVERGED, Outcome.FAILED, Outcome.BLOCKED,
)  # fmt: skip


def became_of_steps(outcome: str) -> StepState:
    """Return the final state of steps that are still open when an operation ends with `outcome`."""
    if outcome == Outcome.COMPLETED:
        return StepState.DONE
    return StepState.UNDONE if outcome in _STAYED else StepState.FAILED


def utc(time: float | None) -> str | None:
    """Format seconds since 1970 as ISO 8601 in UTC with milliseconds; None for None."""
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def _ms(time: Seconds) -> float:
    return round(time * 1000, 1)
