"""Convert events and samples to JSON types, and convert samples back. Pure.

Events of any kind are stored field by field. Times are in milliseconds and have the suffix `_ms`
(`expected_downtime` becomes `expected_downtime_ms`), as in all output of `--json`.
"""

import math
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from vmckpt.journal.records import (
    Record,
    StoredSample,
)
from vmckpt.model.events import Estimate, Sampled
from vmckpt.model.finding import STORED_AS
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.units import Seconds


def as_record(event: object, origin: Seconds, now: Seconds) -> Record:
    """Convert an event to a record.

    `origin`: when the operation began. `now`: when the event was reported. Both times are
    monotonic. An event whose only field is a dataclass, such as a decision, is stored as that
    dataclass. If an event has a time (`at`), that time takes precedence over `now`.
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
    """Convert a stored sample back to an event. Its time is relative to the operation's start."""
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
    """Convert stored values back to a dataclass's fields; None for fields that were not stored."""
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
    """Convert a dataclass to a JSON object, and any other value to `{"text": …}`."""
    if not is_dataclass(value) or isinstance(value, type):
        return {"text": str(value)}
    times = _times(type(value))
    told = {}
    for one in fields(value):
        inside = plain(getattr(value, one.name))
        if one.name in times:
            told[f"{one.name}_ms"] = None if inside is None else round(inside * 1000, 3)
        else:
            told[one.metadata.get(STORED_AS, one.name)] = inside
    return told


@cache
def _times(kind: type) -> frozenset[str]:
    """Return the names of those fields of a dataclass that contain times."""
    hints = get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if _is_time(hint))


def _is_time(hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return Seconds in get_args(hint)
    return hint is Seconds


def plain(value: Any) -> Any:
    """Convert a value to JSON types. NaN and infinity become None; unknown types become text."""
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
