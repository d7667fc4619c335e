"""Messages to and from a lab guest's prover, as little-endian 64-bit words. Pure.

assets/prover.c defines the same layouts: `struct message` for the observer, `struct request` and
`struct reply` for the key-value store.
"""

import struct
from dataclasses import dataclass, fields

from vmckpt_lab.history.history import Input, Kind

NUMBER, PING, PONG, VERIFY, VERIFIED = range(1, 6)
MAGIC = int.from_bytes(b"VMCKP1", "little")
_LAYOUT = struct.Struct("<11Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A datagram. Fields that a kind does not use are 0."""

    kind: int
    token: int = 0
    """Identifies a question; repeated in its answer."""
    run: int = 0
    """Random number chosen at the guest's start, to distinguish the numbers of different runs."""
    number: int = 0
    """The highest number whose record is on the guest's disk."""
    clock_ns: int = 0
    """Time by the guest's monotonic clock, in nanoseconds."""
    pages_written: int = 0
    memory_errors: int = 0
    disk_errors: int = 0
    pages_checked: int = 0
    records_checked: int = 0


_NAMES = tuple(field.name for field in fields(Message))


def encode(message: Message) -> bytes:
    """Encode a message as a datagram."""
    return _LAYOUT.pack(MAGIC, *(getattr(message, name) for name in _NAMES))


def decode(datagram: bytes) -> Message | None:
    """Return the message in a datagram; None if the datagram is not a message."""
    if len(datagram) != _LAYOUT.size:
        return None
    magic, *words = _LAYOUT.unpack(datagram)
    return Message(**dict(zip(_NAMES, words, strict=True))) if magic == MAGIC else None


STORE_KINDS = {Kind.READ: 1, Kind.WRITE: 2, Kind.CAS: 3, Kind.ADD: 4}
"""The kinds of operations that the key-value store supports, with their codes."""
CELLS, SESSIONS = 64, 64
"""Number of keys and sessions of the store, each numbered from 0."""
_REQUEST_MAGIC = int.from_bytes(b"VMCKREQ1", "little")
_REPLY_MAGIC = int.from_bytes(b"VMCKREP1", "little")
_REQUEST = struct.Struct("<8Q")
_REPLY = struct.Struct("<6Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An operation for the key-value store."""

    recording: int
    """Number of the recording. A number higher than all previous numbers empties the store.
    Requests with a lower number are ignored."""
    session: int
    sequence: int
    """Counted from 1 in each session. The store carries out each request at most once, ignores
    numbers below the highest that it has seen, and repeats its answer to the highest."""
    asked: Input


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The store's answer to a request."""

    recording: int
    session: int
    sequence: int
    run: int
    """Random number chosen at the guest's start."""
    before: int
    """The cell's value right before the operation."""


def encode_request(request: Request) -> bytes:
    """Encode a request as a datagram."""
    asked = request.asked
    return _REQUEST.pack(
        _REQUEST_MAGIC, request.recording, request.session, request.sequence,
        STORE_KINDS[asked.kind], asked.key, asked.value, asked.expected,
    )  # fmt: skip


def decode_request(datagram: bytes) -> Request | None:
    """Return the request in a datagram; None if the datagram is not a request."""
    if len(datagram) != _REQUEST.size:
        return None
    magic, recording, session, sequence, kind, key, value, expected = _REQUEST.unpack(datagram)
    kinds = {number: one for one, number in STORE_KINDS.items()}
    if magic != _REQUEST_MAGIC or kind not in kinds:
        return None
    asked = Input(kind=kinds[kind], key=key, value=value, expected=expected)
    return Request(recording=recording, session=session, sequence=sequence, asked=asked)


def encode_reply(reply: Reply) -> bytes:
    """Encode an answer as a datagram."""
    words = (reply.recording, reply.session, reply.sequence, reply.run, reply.before)
    return _REPLY.pack(_REPLY_MAGIC, *words)


def decode_reply(datagram: bytes) -> Reply | None:
    """Return the answer in a datagram; None if the datagram is not an answer."""
    if len(datagram) != _REPLY.size:
        return None
    magic, recording, session, sequence, run, before = _REPLY.unpack(datagram)
    if magic != _REPLY_MAGIC:
        return None
    return Reply(recording=recording, session=session, sequence=sequence, run=run, before=before)
