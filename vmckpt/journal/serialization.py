"""Events, samples and rows of the journal's tables, to JSON's types and back. Pure.

An event of any kind is stored field by field. Times are in milliseconds and say so in their names
(`expected_downtime` becomes `expected_downtime_ms`), as in everything that `--json` prints.
"""

import math
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from sqlalchemy import RowMapping

from vmckpt.journal.records import (
    Controller,
    NewOperation,
    Operation,
    Record,
    Request,
    State,
    StepState,
    StoredEvent,
    StoredForecast,
    StoredSample,
    StoredStep,
)
from vmckpt.model.events import Estimate, Sampled
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import Seconds


def as_record(event: object, origin: Seconds, now: Seconds) -> Record:
    """One event. `origin` is when its operation began, `now` when it was told, both monotonic.

    An event that only carries something else, like a decision, is stored as that. If it has a time
    of its own (`at`), that one counts.
    """
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", type(event).__name__).lower()
    if isinstance(event, Sampled):
        values = {**_fields(event.sample), "done": event.done, **_left(event.estimate)}
    else:
        names = [one.name for one in fields(event)] if is_dataclass(event) else []
        inner = getattr(event, names[0]) if len(names) == 1 else None
        values = _fields(inner if is_dataclass(inner) else event)
    at = values.pop("at_ms", None)
    told = now if at is None else at / 1000
    return Record(kind=kind, at=Seconds(max(0.0, told - origin)), values=values)


def as_sampled(stored: StoredSample) -> Sampled:
    """A sample as it was told; its time is counted from the operation's beginning."""
    values: dict[str, Any] = {"at": stored.at, **_unread(JobSample, stored.values)}
    values["phase"] = JobPhase(stored.values["phase"])
    estimate = Estimate(
        low=_seconds(stored.values.get("left_low_ms")),
        high=_seconds(stored.values.get("left_high_ms")),
        converging=stored.values.get("converging"),
    )
    return Sampled(sample=JobSample(**values), estimate=estimate, done=stored.done)


def _left(estimate: Estimate) -> dict[str, Any]:
    told = _fields(estimate)
    return {
        "left_low_ms": told["low_ms"],
        "left_high_ms": told["high_ms"],
        "converging": told["converging"],
    }


def _unread(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, from what was stored of it; what it did not have then is None."""
    times = _times(kind)
    return {
        one.name: _seconds(values.get(f"{one.name}_ms"))
        if one.name in times
        else values.get(one.name)
        for one in fields(kind)
        if one.name != "at"
    }


def _seconds(milliseconds: float | None) -> Seconds | None:
    return None if milliseconds is None else Seconds(milliseconds / 1000)


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass as an object of JSON; anything else as its text."""
    if not is_dataclass(value) or isinstance(value, type):
        return {"text": str(value)}
    times = _times(type(value))
    told = {}
    for one in fields(value):
        inside = plain(getattr(value, one.name))
        if one.name in times:
            told[f"{one.name}_ms"] = None if inside is None else round(inside * 1000, 3)
        else:
            told[one.name] = inside
    return told


@cache
def _times(kind: type) -> frozenset[str]:
    """Fields that are times."""
    hints = get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if _is_time(hint))


def _is_time(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return Seconds in get_args(hint)
    return hint is Seconds


def plain(value: Any) -> Any:
    """Anything, in JSON's types."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list | set | frozenset):
        return [plain(one) for one in value]
    return str(value)


def new_operation(
    new: NewOperation, controller: Controller, *, asked_by: str, asked_from: str | None
) -> dict[str, Any]:
    """The row of an operation that begins, but for its id and the time."""
    return {
        "kind": new.kind,
        "guest": new.guest,
        "guest_uuid": new.guest_uuid,
        "source": new.source,
        "target": new.target,
        "policy": new.policy,
        "mode": new.mode,
        "state": State.RUNNING,
        "asked_by": asked_by,
        "asked_from": asked_from,
        **controlled_by(controller),
        "thinned": 0,
        "detail": plain(new.detail),
    }


def controlled_by(controller: Controller) -> dict[str, Any]:
    """The columns that name a controller."""
    return {
        "controller_host": controller.host,
        "controller_boot": controller.boot,
        "controller_pid": controller.pid,
        "controller_started": controller.started,
    }


CONTROLLER = ("host", "boot", "pid", "started")


def controller(row: RowMapping) -> Controller:
    """Who runs an operation."""
    return Controller(
        host=row["controller_host"],
        boot=row["controller_boot"],
        pid=row["controller_pid"],
        started=row["controller_started"],
    )


def operation(row: RowMapping) -> Operation:
    """An operation with its controller."""
    return Operation(
        id=row["id"],
        kind=row["kind"],
        guest=row["guest"],
        guest_uuid=row["guest_uuid"],
        source=row["source"],
        target=row["target"],
        policy=row["policy"],
        mode=row["mode"],
        state=row["state"],
        phase=row["phase"],
        outcome=row["outcome"],
        asked_by=row["asked_by"],
        asked_from=row["asked_from"],
        controller=controller(row),
        began_at=row["began_at"],
        ended_at=row["ended_at"],
        detail=row["detail"],
        report=row["report"],
        alive_until=row["alive_until"],
    )


def request(row: RowMapping) -> Request:
    """A request; its columns are its fields."""
    return Request(**row)


def stored_event(row: RowMapping) -> StoredEvent:
    """An event."""
    return StoredEvent(seq=row["seq"], at=Seconds(row["at"]), kind=row["kind"], values=row["data"])


def stored_sample(row: RowMapping) -> StoredSample:
    """A sample."""
    return StoredSample(seq=row["seq"], at=Seconds(row["at"]), values=row["data"])


def stored_step(row: RowMapping) -> StoredStep:
    """A step."""
    return StoredStep(
        seq=row["seq"],
        name=row["name"],
        intent=row["intent"],
        state=StepState(row["state"]),
        result=row["result"],
        began_at=row["began_at"],
        ended_at=row["ended_at"],
    )


def stored_forecast(row: RowMapping) -> StoredForecast:
    """A forecast."""
    return StoredForecast(made_at=row["made_at"], values=row["data"])
