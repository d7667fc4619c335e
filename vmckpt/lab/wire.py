"""Messages between a lab guest's prover and the observer: twelve little-endian 64-bit words. Pure.

The layout is that of `struct message` in assets/prover.c.
"""

import struct
from dataclasses import dataclass, fields

NUMBER, PING, PONG, VERIFY, VERIFIED = range(1, 6)
MAGIC = int.from_bytes(b"VMCKP1", "little")
_LAYOUT = struct.Struct("<12Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One datagram. Fields a kind does not use are 0."""

    kind: int
    token: int = 0
    """Chosen by whoever asks, repeated in the answer."""
    run: int = 0
    """Drawn by the guest at its start: numbers of two starts never mix."""
    number: int = 0
    """The highest number whose record is on the guest's disk."""
    ticks: int = 0
    """The guest's own count of 10 ms ticks; it stands still while the guest does."""
    clock_ns: int = 0
    """The guest's monotonic clock."""
    pages_written: int = 0
    memory_errors: int = 0
    disk_errors: int = 0
    pages_checked: int = 0
    records_checked: int = 0


_NAMES = tuple(field.name for field in fields(Message))


def encode(message: Message) -> bytes:
    """The datagram for a message."""
    return _LAYOUT.pack(MAGIC, *(getattr(message, name) for name in _NAMES))


def decode(datagram: bytes) -> Message | None:
    """The message in a datagram; None if it is not one of ours."""
    if len(datagram) != _LAYOUT.size:
        return None
    magic, *words = _LAYOUT.unpack(datagram)
    return Message(**dict(zip(_NAMES, words, strict=True))) if magic == MAGIC else None
