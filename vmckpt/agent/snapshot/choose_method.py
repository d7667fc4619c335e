"""Choose the method by which a guest's memory is captured. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import MIB, Bytes, show_bytes

# Memory that must stay free on the host in addition to a last copy.
_SPARE = 64 * MIB


class MemoryMethod(StrEnum):
    """A method of capturing memory."""

    AUTO = "auto"
    TRACKING = "tracking"
    """Read pages written since the previous snapshot, found by write tracking."""
    BACKGROUND = "background"
    """QEMU's background snapshot."""
    SHARED = "shared"
    """Compare the memory of the paused guest with its last copy."""
    LIBVIRT = "libvirt"
    """libvirt's memory snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFacts:
    """Facts about a guest and its host before a capture."""

    runs: bool
    untracked: str | None
    """Why the guest's writes cannot be tracked; None: they can be, as far as is known."""
    private: str | None
    """Why the guest's memory cannot be mapped; None: it can be mapped."""
    kept: bool = False
    """The host has a copy of the memory from an earlier capture, made since this QEMU started."""
    memory: Bytes = Bytes(0)
    """Size of the guest's memory files."""
    room: Bytes = Bytes(0)
    """Space available for a new copy of the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A method, and the reason for it."""

    way: MemoryMethod
    why: str
    against: str | None = None
    """Why the method cannot work; None: no reason is known."""


def choose(asked: MemoryMethod, seen: CaptureFacts) -> Choice:
    """Choose a method for the first attempt. `asked`: the method that the operator requested."""
    if asked in (MemoryMethod.BACKGROUND, MemoryMethod.LIBVIRT):
        return Choice(way=asked, why="requested")
    untracked = seen.untracked if seen.runs else "the guest is not running"
    if asked is MemoryMethod.TRACKING:
        return Choice(way=asked, why="requested", against=untracked)
    if asked is MemoryMethod.AUTO and untracked is None:
        return Choice(way=MemoryMethod.TRACKING, why="works with any memory")
    against = _against_shared(seen)
    if asked is MemoryMethod.SHARED:
        return Choice(way=asked, why="requested", against=against)
    if seen.kept and against is None:
        return Choice(
            way=MemoryMethod.SHARED,
            why="the host has a copy of the guest's memory from an earlier snapshot",
        )
    return Choice(way=MemoryMethod.BACKGROUND, why=f"no write tracking: {untracked}")


def otherwise(asked: MemoryMethod, failed: MemoryMethod) -> MemoryMethod | None:
    """Return the method to try after `failed`; None if there is none, or if the operator requested
    `failed`.
    """
    if asked is not MemoryMethod.AUTO:
        return None
    return {
        MemoryMethod.TRACKING: MemoryMethod.BACKGROUND,
        MemoryMethod.SHARED: MemoryMethod.BACKGROUND,
        MemoryMethod.BACKGROUND: MemoryMethod.LIBVIRT,
    }.get(failed)


def _against_shared(seen: CaptureFacts) -> str | None:
    if seen.private is not None:
        return seen.private
    if not seen.runs:
        return "the guest is not running"
    if not seen.kept and seen.room < seen.memory + _SPARE:
        return (
            f"a copy of the guest's memory needs {show_bytes(seen.memory)}, but its host has only"
            f" {show_bytes(seen.room)} available"
        )
    return None
