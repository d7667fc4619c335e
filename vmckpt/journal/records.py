"""What is written to the journal and read from it: frozen data, with its JSON form. Pure.

Times of an operation are seconds since 1970 (UTC); times inside it are seconds since it began.
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
"""The kind of operation that keeps guests away from a host until somebody ends it."""

MIGRATE = "migrate"
"""The kind of one guest's migration."""

FORGOTTEN = "forgotten_by"
"""In the report of an operation that somebody ended by his word: who."""

WHOLE_HOST = ("evacuate", "repopulate", "balance")
"""Kinds of operations that are about a host and all its guests."""


class State(StrEnum):
    """Whether an operation is under way. What it does then is its phase."""

    RUNNING = "running"
    WAITING = "waiting"
    """For its turn, or for the next attempt."""
    ENDED = "ended"


class RequestKind(StrEnum):
    """What may be asked of a running operation."""

    BANDWIDTH = "bandwidth"
    """{"bytes_per_second": number or null}; null: no limit."""
    MAX_DOWNTIME = "max-downtime"
    """{"seconds": number}."""
    POSTCOPY = "postcopy"
    CANCEL = "cancel"
    PAUSE = "pause"
    GO_ON = "go-on"
    """Of a job that was paused."""


class StepState(StrEnum):
    """How far a step has come. What was only intended may or may not have been done."""

    INTENDED = "intended"
    DONE = "done"
    UNDONE = "undone"
    """It was done, or half of it, and was taken back."""
    FAILED = "failed"
    """It was tried and changed nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerIdentity:
    """The process that runs an operation, so that nobody takes another one for it."""

    host: str
    boot: str
    """The kernel's boot id."""
    pid: int
    started: int
    """Clock ticks from boot to the process's start."""

    @property
    def entrusted(self) -> bool:
        """Agents on hosts go on with it by themselves: nobody attends it, and need not."""
        return not self.boot


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOperation:
    """What is known of an operation when it begins."""

    kind: str
    """"migrate", …; its first letter begins the job's id."""
    guest: str
    guest_uuid: str | None = None
    source: str | None = None
    target: str | None = None
    policy: str | None = None
    mode: str | None = None
    detail: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    """What was asked for, in JSON's types."""


class Changes(TypedDict, total=False):
    """What of an operation may change while it runs."""

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
    """One operation as the journal has it."""

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
    """None: it has not ended."""
    asked_by: str
    """user@host."""
    asked_from: str | None
    """Address or terminal that the order came from."""
    controller: ControllerIdentity
    began_at: float
    ended_at: float | None
    detail: Mapping[str, Any]
    report: Mapping[str, Any] | None
    """What the command said at its end, without the samples."""
    alive_until: float | None = None
    """Until when its controller's last word is good, by the journal's clock; None: it gave none."""

    @property
    def way(self) -> str:
        """From where to where, or the kind of operation and where it is."""
        if self.target is None and self.kind != MIGRATE:
            return f"{self.kind} on {self.source or '?'}"
        return f"{self.source or '?'} → {self.target or '?'}"

    @property
    def active(self) -> bool:
        return self.ended_at is None

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
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
    """An event or a sample on its way into the journal."""

    kind: str
    at: Seconds
    """Since the operation began."""
    values: Mapping[str, Any]
    """In JSON's types and the units that `--json` prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """Something an operation told."""

    seq: int
    at: Seconds
    kind: str
    values: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"at_ms": _ms(self.at), "kind": self.kind, **self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """One reading of an operation's progress."""

    seq: int
    at: Seconds
    values: Mapping[str, Any]

    @property
    def done(self) -> float:
        """Share of the work that is done, 0 to 1."""
        return float(self.values.get("done") or 0.0)

    def as_json(self) -> dict[str, Any]:
        return {"at_ms": _ms(self.at), **self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStep:
    """Something that was to be changed, written down before it was tried."""

    seq: int
    name: str
    intent: Mapping[str, Any]
    state: StepState
    result: Mapping[str, Any] | None
    """None: nobody has said what came of it."""
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
    """What was expected of an operation."""

    made_at: float
    values: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"made": utc(self.made_at), **self.values}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What another terminal asked of a running operation."""

    id: int
    operation: str
    kind: str
    arguments: Mapping[str, Any]
    asked_by: str
    asked_at: float
    taken_at: float | None
    """None: the controller has not seen it."""
    answered_at: float | None
    ok: bool | None
    """None: not answered."""
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
    """What is written in one transaction."""

    changes: Changes = field(default_factory=Changes)
    events: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    forecasts: list[StoredForecast] = field(default_factory=list)
    answers: list[tuple[int, bool, str]] = field(default_factory=list)
    """Request, whether it was done, and what is to be said."""
    ending: tuple[str, Mapping[str, Any] | None] | None = None
    """Outcome and report."""

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
        """Both, this one first."""
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
    """What became of the steps that are open when an operation ends so."""
    if outcome == Outcome.COMPLETED:
        return StepState.DONE
    return StepState.UNDONE if outcome in _STAYED else StepState.FAILED


def utc(time: float | None) -> str | None:
    """A time as ISO 8601 says it, in milliseconds."""
    if time is None:
        return None
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds")


def _ms(time: Seconds) -> float:
    return round(time * 1000, 1)
