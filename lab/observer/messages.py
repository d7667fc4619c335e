"""Messages between a lab guest's prover and programs outside: little-endian 64-bit words. Pure.

The layouts are those in assets/prover.c: `struct message` of the observer, `struct request` and
`struct reply` of the key-value store.
"""

import struct
from dataclasses import dataclass, fields

from vmckpt_lab.history.history import Input, Kind

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


STORE_KINDS = {Kind.READ: 1, Kind.WRITE: 2, Kind.CAS: 3, Kind.ADD: 4}
"""What the key-value store can be asked for."""
CELLS, SESSIONS = 64, 64
"""How many keys and sessions the store has, each counted from 0."""
_REQUEST_MAGIC = int.from_bytes(b"VMCKREQ1", "little")
_REPLY_MAGIC = int.from_bytes(b"VMCKREP1", "little")
_REQUEST = struct.Struct("<8Q")
_REPLY = struct.Struct("<6Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One operation for the key-value store."""

    recording: int
    """One that is higher than all before empties the store; requests of lower ones are ignored."""
    session: int
    sequence: int
    """Counted from 1 in each session. The store carries out each at most once, and none below the
    highest that it has seen; it repeats its answer to that one."""
    asked: Input


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The store's answer."""

    recording: int
    session: int
    sequence: int
    run: int
    """Drawn by the guest at its start."""
    before: int
    """What the cell held right before."""


def encode_request(request: Request) -> bytes:
    """The datagram for a request."""
    asked = request.asked
    return _REQUEST.pack(
        _REQUEST_MAGIC, request.recording, request.session, request.sequence,
        STORE_KINDS[asked.kind], asked.key, asked.value, asked.expected,
    )  # fmt: skip


def decode_request(datagram: bytes) -> Request | None:
    """The request in a datagram; None if it is none."""
    if len(datagram) != _REQUEST.size:
        return None
    magic, recording, session, sequence, kind, key, value, expected = _REQUEST.unpack(datagram)
    kinds = {number: one for one, number in STORE_KINDS.items()}
    if magic != _REQUEST_MAGIC or kind not in kinds:
        return None
    asked = Input(kind=kinds[kind], key=key, value=value, expected=expected)
    return Request(recording=recording, session=session, sequence=sequence, asked=asked)


def encode_reply(reply: Reply) -> bytes:
    """The datagram for an answer of the store."""
    words = (reply.recording, reply.session, reply.sequence, reply.run, reply.before)
    return _REPLY.pack(_REPLY_MAGIC, *words)


def decode_reply(datagram: bytes) -> Reply | None:
    """The answer in a datagram; None if it is none."""
    if len(datagram) != _REPLY.size:
        return None
    magic, recording, session, sequence, run, before = _REPLY.unpack(datagram)
    if magic != _REPLY_MAGIC:
        return None
    return Reply(recording=recording, session=session, sequence=sequence, run=run, before=before)
