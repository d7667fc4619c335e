"""How things are put into words and small pictures, wherever they are shown. Pure."""

import time
from collections.abc import Mapping
from typing import Any

from vmckpt.model.now import HostNow
from vmckpt.units import Bytes, Seconds, show_bytes, show_seconds

_EIGHTHS = "·▏▎▍▌▋▊▉█"


def host_in_words(host: HostNow) -> str:
    """For a choice: "beta, 12.0 GiB of 64.0 GiB free"."""
    return f"{host.name}, {show_bytes(host.free)} of {show_bytes(host.memory)} free"


def bar(share: float, width: int) -> str:
    """A bar that is as full as the share; exact to an eighth of a character."""
    filled = max(0.0, min(1.0, share)) * width
    whole = int(filled)
    rest = _EIGHTHS[int((filled - whole) * 8)] if whole < width else ""
    return ("█" * whole + rest).ljust(width, "·")[:width]


def clock(at: float, now: float) -> str:
    """A time as a clock on the wall shows it, with the day if that is another one."""
    local, today = time.localtime(at), time.localtime(now)
    if local[:3] == today[:3]:
        return time.strftime("%H:%M:%S", local)
    return time.strftime("%d %b %H:%M" if local[0] == today[0] else "%Y-%m-%d", local)


def ago(at: float, now: float) -> str:
    """How long something is ago, roughly: "3 min", "2 d"."""
    passed = max(0.0, now - at)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= size:
            return f"{passed / size:.0f} {name}"
    return f"{passed:.0f} s"


def pairs(values: Mapping[str, Any]) -> str:
    """Numbers of a decision."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def millis(value: float | None) -> str:
    """Milliseconds as a time; "–" for nothing."""
    return "–" if value is None else show_seconds(Seconds(value / 1000))


def span(low: float | None, high: float | None) -> str:
    """A range of seconds."""
    if low is None:
        return "not known yet"
    first = show_seconds(Seconds(low))
    if high is None:
        return f"at least {first}"
    last = show_seconds(Seconds(high))
    return f"about {first}" if first == last else f"{first} to {last}"


def size(value: float | None) -> str:
    """Bytes; "–" for nothing."""
    return "–" if value is None else show_bytes(Bytes(int(value)))
