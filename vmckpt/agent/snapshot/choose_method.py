"""Which way a guest's memory is captured, and why. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import MIB, Bytes, show_bytes

# What the host is left with beside a last copy.
_SPARE = 64 * MIB


class Way(StrEnum):
    """How memory is captured."""

    AUTO = "auto"
    BACKGROUND = "background"
    """QEMU's background snapshot."""
    SHARED = "shared"
    """The guest's memory is compared with its last copy while it stands still."""
    LIBVIRT = "libvirt"
    """libvirt's memory snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of a guest and its host before a capture."""

    runs: bool
    private: str | None
    """Why its memory cannot be mapped; None: it can."""
    kept: bool = False
    """A last copy of its memory, as long as this QEMU lives, is there."""
    memory: Bytes = Bytes(0)
    """In its files."""
    room: Bytes = Bytes(0)
    """For a last copy that is to be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The way, and why it is this one."""

    way: Way
    why: str
    against: str | None = None
    """Why it cannot be done; None: nothing is known."""


def choose(asked: Way, seen: Seen) -> Choice:
    """Decide before anything is tried."""
    if asked in (Way.BACKGROUND, Way.LIBVIRT):
        return Choice(way=asked, why="asked for")
    against = _against_shared(seen)
    if asked is Way.SHARED:
        return Choice(way=asked, why="asked for", against=against)
    if seen.kept and against is None:
        return Choice(way=Way.SHARED, why="its last copy is there")
    return Choice(way=Way.BACKGROUND, why=_why_not(seen, against))


def otherwise(asked: Way, failed: Way) -> Way | None:
    """What is tried when a way cannot capture this guest; None: nothing, it was asked for."""
    if asked is not Way.AUTO:
        return None
    return {Way.SHARED: Way.BACKGROUND, Way.BACKGROUND: Way.LIBVIRT}.get(failed)


def _against_shared(seen: Seen) -> str | None:
    if seen.private is not None:
        return seen.private
    if not seen.runs:
        return "it stands still"
    if not seen.kept and seen.room < seen.memory + _SPARE:
        return (
            f"a copy of its memory takes {show_bytes(seen.memory)}, and its host has room for"
            f" {show_bytes(seen.room)}"
        )
    return None


def _why_not(seen: Seen, against: str | None) -> str:
    if seen.kept and against is not None:
        return against
    if seen.private is None:
        return "its memory was not copied yet; --way shared does that"
    return "it works with any memory"
