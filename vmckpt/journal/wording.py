"""What operations tell, and times, in words: the same wherever they are shown. Pure."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from vmckpt.units import Seconds, show_bytes, show_rate, show_seconds


def event(kind: str, values: Mapping[str, Any]) -> str | None:
    """An event in a line; None if it is not worth one."""
    match kind:
        case "phase-changed":
            return f"phase={values.get('phase')}"
        case "decided":
            if values.get("rule") == "evacuate":
                return f"{values['action']}: {values['reason']}"
            seen = "" if values.get("acted", True) else " (only watched)"
            shown = numbers(values["numbers"])
            return f"decided {values['action']}, because {values['reason']}{seen} {shown}".rstrip()
        case "checked":
            found = [f for f in values["findings"] if f["severity"] in ("warning", "blocker")]
            return "; ".join(f"{f['where']}: {f['text']}" for f in found) or None
        case _:
            return f"{kind} {pairs(values)}".rstrip()


def pairs(values: Mapping[str, Any]) -> str:
    """Numbers of a decision, arguments of a request."""
    return " ".join(f"{key}={value}" for key, value in values.items())


_SHOWN = {"remaining": show_bytes, "bandwidth": show_rate, "dirty_rate": show_rate}


def numbers(values: Mapping[str, Any]) -> str:
    """What a decision was made from, as far as it was known."""
    known = {key: value for key, value in values.items() if value is not None}
    return pairs({key: _SHOWN.get(key, str)(value) for key, value in known.items()})


def time_left(low: Seconds | None, high: Seconds | None, *, converging: bool | None) -> str:
    """How long it will still take: a range, or the plain truth: "3 to 5 s", "not converging"."""
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
    """A time as a clock on the wall shows it, with the day if that is another one."""
    local, today = (datetime.fromtimestamp(one, UTC).astimezone() for one in (at, now))
    if local.date() == today.date():
        return f"{local:%H:%M:%S}"
    return f"{local:%d %b %H:%M}" if local.year == today.year else f"{local:%Y-%m-%d}"
