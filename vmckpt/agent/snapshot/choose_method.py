"""Which way a guest's memory is captured, and why. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import MIB, Bytes, show_bytes

# What the host is left with beside a last copy.
_SPARE = 64 * MIB


class MemoryMethod(StrEnum):
    """How memory is captured."""

    AUTO = "auto"
    BACKGROUND = "background"
    """QEMU's background snapshot."""
    SHARED = "shared"
    """The guest's memory is compared with its last copy while it stands still."""
    LIBVIRT = "libvirt"
    """libvirt's memory snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFacts:
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

    way: MemoryMethod
    why: str
    against: str | None = None
    """Why it cannot be done; None: nothing is known."""


def choose(asked: MemoryMethod, seen: CaptureFacts) -> Choice:
    """Decide before anything is tried."""
    if asked in (MemoryMethod.BACKGROUND, MemoryMethod.LIBVIRT):
        return Choice(way=asked, why="asked for")
    against = _against_shared(seen)
    if asked is MemoryMethod.SHARED:
        return Choice(way=asked, why="asked for", against=against)
    if seen.kept and against is None:
        return Choice(way=MemoryMethod.SHARED, why="its last copy is there")
    return Choice(way=MemoryMethod.BACKGROUND, why=_why_not(seen, against))


def otherwise(asked: MemoryMethod, failed: MemoryMethod) -> MemoryMethod | None:
    """What is tried when a way cannot capture this guest; None: nothing, it was asked for."""
    if asked is not MemoryMethod.AUTO:
        return None
    return {
        MemoryMethod.SHARED: MemoryMethod.BACKGROUND,
        MemoryMethod.BACKGROUND: MemoryMethod.LIBVIRT,
    }.get(failed)


def _against_shared(seen: CaptureFacts) -> str | None:
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


def _why_not(seen: CaptureFacts, against: str | None) -> str:
    if seen.kept and against is not None:
        return against
    if seen.private is None:
        return "its memory was not copied yet; --way shared does that"
    return "it works with any memory"
