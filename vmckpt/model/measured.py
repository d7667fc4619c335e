"""What was measured of a guest and of a link before a migration, with its uncertainty."""

from dataclasses import dataclass

from vmckpt.units import Bytes, BytesPerSecond, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DirtyPoint:
    """How many different bytes a guest wrote within a time."""

    time: Seconds
    dirtied: float
    """Bytes."""
    error: float
    """Bytes either way: two standard deviations of the sampling, and the rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeen:
    """A guest's memory as a sample of its pages shows it."""

    size: Bytes
    """All of it."""
    resident: float
    """Bytes that the host has given room to, swapped ones included."""
    in_use: float
    """Bytes of pages that are not all zero: those are sent whole."""
    error: float
    """Bytes of `in_use` either way, two standard deviations."""
    dirtied: tuple[DirtyPoint, ...]
    tail: tuple[tuple[float, float], ...]
    """(bytes from the end of memory, of which in use), rising to all of it."""
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSeen:
    """What one TCP connection carried from source to target."""

    rate: BytesPerSecond
    """After the beginning, which buffers and token buckets flatter."""
    received: Bytes
    lasted: Seconds
