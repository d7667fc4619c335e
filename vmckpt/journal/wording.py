"""Format events, decisions and times of operations as text, for all front ends. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from vmckpt.units import Seconds, show_bytes, show_count, show_rate, show_seconds


def event(kind: str, values: Mapping[str, Any]) -> str | None:
    """Format an event as one line of text; None if the event is not worth showing.

    `kind` and `values`: as stored in the journal.
    """
    match kind:
        case "phase-changed":
            return f"phase={values.get('phase')}"
        case "decided":
            if values.get("rule") == "evacuate":
                return f"{values['action']}: {values['reason']}"
            seen = "" if values.get("acted", True) else " (observed only)"
            shown = numbers(values["numbers"])
            return f"decided {values['action']}, because {values['reason']}{seen} {shown}".rstrip()
        case "checked":
            found = [f for f in values["findings"] if f["severity"] in ("warning", "blocker")]
            return "; ".join(f"{f['where']}: {f['text']}" for f in found) or None
        case "work-failed":
            return f"{values['work']} failed {show_count(values['times'], 'time')}: {values['why']}"
        case "work-done":
            return f"{values['work']} succeeded"
        case _:
            return f"{kind} {pairs(values)}".rstrip()


def pairs(values: Mapping[str, Any]) -> str:
    """Format the numbers of a decision, or the arguments of a request, as "a=1 b=2"."""
    return " ".join(f"{key}={value}" for key, value in values.items())


_SHOWN = {"remaining": show_bytes, "bandwidth": show_rate, "dirty_rate": show_rate}


def numbers(values: Mapping[str, Any]) -> str:
    """Format the known numbers on which a decision was based, with units."""
    known = {key: value for key, value in values.items() if value is not None}
    return pairs({key: _SHOWN.get(key, str)(value) for key, value in known.items()})


def time_left(low: Seconds | None, high: Seconds | None, *, converging: bool | None) -> str:
    """Format the time left.

    The forms are "about 3 s", "3 to 5 s", "at least 3 s", "not converging" and "not known yet".
    """
    if converging is False:
        return "not converging"
    if low is None:
        return "not known yet"
    first = show_seconds(low)
    if high is None:
        return f"at least {first}"
    last = show_seconds(high)
    return f"about {first}" if first == last else f"{first} to {last}"


def clock(at: float, now: float) -> str:
    """Format a time as local time: today's as time of day, other times with their date.

    `at` and `now`: seconds since 1970.
    """
    local, today = (datetime.fromtimestamp(one, UTC).astimezone() for one in (at, now))
    if local.date() == today.date():
        return f"{local:%H:%M:%S}"
    return f"{local:%d %b %H:%M}" if local.year == today.year else f"{local:%Y-%m-%d}"
