"""Types for sizes, times and rates; functions that parse and format them.

Size units are powers of 1024 in every spelling: "64M", "64MiB" and "64MB" all mean 64 MiB. QEMU
reads "64M" in the same way, but virsh reads "64MB" as 64 000 000 bytes. Link speeds are decimal
bits, as in tc: "200mbit" is 25 000 000 bytes per second.
"""

import math
import re
from typing import NewType

Bytes = NewType("Bytes", int)
Seconds = NewType("Seconds", float)
BytesPerSecond = NewType("BytesPerSecond", int)

MIB = 1024 * 1024
GIB = 1024 * MIB

MEMORY_UNITS = {"b": 1, "byte": 1, "bytes": 1} | {
    f"{letter}{end}": base ** (power + 1)
    for power, letter in enumerate("kmgtpe")
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
"""Bytes in libvirt's units of memory, which ignore case: "MiB" and "M" are 1024², "MB" is 1000²."""

# No sensible value is longer, and a regular expression can be slow on a long text.
_LONGEST = 40
_NUMBER = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-zA-Zµ]*)\s*")
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def _split(text: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        raise ValueError(f"{short!r} is invalid; use a value like {example}")
    return float(match[1]), match[2]


def parse_bytes(text: str) -> Bytes:
    """Parse a size such as "64MiB", "2G" or "4096". Raises ValueError with an example."""
    number, suffix = _split(text, "64MiB")
    unit = suffix.lower().removesuffix("b").removesuffix("i")
    if unit not in _BINARY or suffix.lower() == "i":
        raise ValueError(f"{text!r}: unknown size unit {suffix!r}; use a value like 64MiB")
    return Bytes(round(number * _BINARY[unit]))


def parse_seconds(text: str) -> Seconds:
    """Parse a time such as "300ms", "5m" or "1.5s".

    Raises ValueError, with an example, for an invalid text or a missing unit: any default unit
    would be a guess.
    """
    number, suffix = _split(text, "300ms, 5m or 2h")
    if suffix not in _TIMES:
        raise ValueError(
            f"{text!r}: unknown time unit {suffix!r}; use a value like 300ms, 5m or 2h"
        )
    return Seconds(number * _TIMES[suffix])


def parse_rate(text: str) -> BytesPerSecond:
    """Parse a rate such as "200MiB/s" (bytes) or "1gbit" (bits).

    Raises ValueError with an example.
    """
    unit = _split(text.lower().removesuffix("/s"), "200MiB/s or 1gbit")[1]
    if unit in _DECIMAL:
        number = _split(text.lower().removesuffix("/s"), "1gbit")[0]
        return BytesPerSecond(round(number * _DECIMAL[unit] / 8))
    if not text.endswith("/s"):
        raise ValueError(f"{text!r} is not a rate; use a value like 200MiB/s or 1gbit")
    return BytesPerSecond(parse_bytes(text.removesuffix("/s")))


def show_bytes(size: float) -> str:
    """Format a size with at most three digits, such as "138 MiB".

    Returns "unlimited" for infinity and "unknown" for NaN.
    """
    if not math.isfinite(size):
        return "unlimited" if size > 0 else "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 10 else f"{size:.1f} {unit}"


def show_count(number: int, noun: str) -> str:
    """Format a number with its noun: "1 guest", "3 guests", "12,000 packets".

    `noun` is singular; its plural must end in a plain "s".
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def show_rate(rate: float) -> str:
    """Format a rate, given in bytes per second, such as "20 MiB/s"."""
    return show_bytes(rate) + "/s"


def show_seconds(time: float) -> str:
    """Format a time, such as "83 ms", "4.2 s" or "2 min 05 s".

    Returns "forever" for infinity and "unknown" for NaN.
    """
    if not math.isfinite(time):
        return "forever" if time > 0 else "unknown"
    if time < 0.0005:
        return "0 ms"
    if time < 1:
        return f"{time * 1000:.0f} ms"
    if time < 100:
        return f"{time:.1f} s"
    minutes, seconds = divmod(round(time), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
