"""Short texts and bars that several parts of the dashboard show. Pure."""

from vmckpt.model.guest import HostNow
from vmckpt.units import Seconds, show_bytes, show_seconds

_EIGHTHS = "·▏▎▍▌▋▊▉█"


def host_in_words(host: HostNow) -> str:
    """Return a host as a choice, like "beta, 12.0 GiB of 64.0 GiB free"."""
    return f"{host.name}, {show_bytes(host.free)} of {show_bytes(host.memory)} free"


def bar(share: float, width: int) -> str:
    """Return a bar of `width` characters, filled to `share` (0 to 1) in eighths of a character."""
    filled = max(0.0, min(1.0, share)) * width
    whole = int(filled)
    rest = _EIGHTHS[int((filled - whole) * 8)] if whole < width else ""
    return ("█" * whole + rest).ljust(width, "·")[:width]


def ago(at: float, now: float) -> str:
    """Return the approximate time since `at`, like "3 min" or "2 d"."""
    passed = max(0.0, now - at)
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= size:
            return f"{passed / size:.0f} {name}"
    return f"{passed:.0f} s"


def millis(value: float | None) -> str:
    """Format a time in milliseconds; "–" for None."""
    return "–" if value is None else show_seconds(Seconds(value / 1000))
