"""The messages between the agents of a protected guest, and the order of an epoch's parts. Pure.

The body of a message consists of fields of fixed size, big endian, followed by at most one field
that takes up the rest. The epoch of a message is not in the body but in the frame (see `framing`).
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from blake3 import blake3

from vmckpt.errors import VmckptError

DIGEST = 16
"""Size of the digest of a message or of an epoch, in bytes."""

_PART = struct.Struct(">HQ")
AGAIN = "the agents reconnect; if this happens again, check the network between the hosts"
HANDED_OVER = "switched"
"""The `why` of an End message that hands the guest over; agents of all versions use this word."""


class WireError(VmckptError):
    """The other end sent an invalid message, which is ignored; the connection is closed."""


class Damaged(WireError):
    """The data is not a valid message: wrong magic, digest or body."""


class CutOff(WireError):
    """The connection ended in the middle of a message."""


class WrongToken(WireError):
    """The sender does not hold the lease, or no longer holds it."""


class Replayed(WireError):
    """The message belongs to an epoch that is already committed."""


class OutOfOrder(WireError):
    """An epoch has missing or misplaced parts, or does not follow the last committed epoch."""


class TooNew(WireError):
    """The other end uses a newer version of the protocol."""


class TooLong(WireError):
    """The body is larger than the maximum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of the primary."""

    kind: ClassVar[int] = 1
    session: str
    """ID of the protection's session."""
    captured: int
    """The last captured epoch, or 1 if it is unknown.

    0: the backup must discard its epoch, and gets a first copy.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloAck:
    """The backup's answer to Hello."""

    kind: ClassVar[int] = 2
    session: str
    committed: int
    """The last committed epoch; 0: no epoch was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Pages of one block of memory, encoded by `page_codec.encode`."""

    kind: ClassVar[int] = 3
    epoch: int
    file: int
    """Number of the block of memory, from 0; see MemoryLayout."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """Writes to one disk, as records in the format of a write log, compressed with zstd."""

    kind: ClassVar[int] = 4
    epoch: int
    disk: int
    """Number of the replicated disk, from 0."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Device state, encoded by `page_codec.encode_state`."""

    kind: ClassVar[int] = 5
    epoch: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The end of an epoch: all its parts were sent, and the backup may commit it."""

    kind: ClassVar[int] = 6
    epoch: int
    base: int
    """The last committed epoch, to which this epoch's differences refer."""
    messages: int
    """Number of Pages, Writes and DeviceState messages in the epoch."""
    digest: bytes
    """`Tally.digest` of these messages: 16 bytes."""
    final: bool
    """Whether the guest stays paused after the epoch, for a planned switchover."""
    taken: float
    """When the epoch was captured, by the primary's wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The backup has committed the epoch."""

    kind: ClassVar[int] = 7
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A heartbeat, in either direction."""

    kind: ClassVar[int] = 8
    sent: float
    """When the heartbeat was sent, by the sender's wall clock."""
    note: bytes
    """The sender's status as JSON, which this module does not parse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of consecutive pages of memory, or of consecutive 64 KiB pieces of a disk."""

    kind: ClassVar[int] = 9
    file: int
    """Number of the block of memory, from 0; for a disk, -1 minus the disk's number."""
    first: int
    """Number of the first page or piece."""
    data: bytes
    """8 bytes for each page or piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """A request for Digests."""

    kind: ClassVar[int] = 10
    file: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """The sender refuses to continue, and closes the connection afterwards."""

    kind: ClassVar[int] = 11
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The protection has ended; the backup confirms with the same message, and removes the standby.

    If `why` is HANDED_OVER, the guest was handed over, and the backup runs it instead.
    """

    kind: ClassVar[int] = 12
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """The blocks of memory that later messages refer to by their numbers.

    The primary sends this after HelloAck, and whenever memory was plugged into the guest.
    """

    kind: ClassVar[int] = 13
    data: bytes
    """A `memory_layout.Layout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutAck:
    """The standby has the blocks of the last MemoryLayout. New blocks are zero."""

    kind: ClassVar[int] = 14


Part: TypeAlias = Pages | Writes | DeviceState
"""A part of an epoch."""
Message: TypeAlias = (
    Hello
    | HelloAck
    | Pages
    | Writes
    | DeviceState
    | EpochEnd
    | Ack
    | Heartbeat
    | Digests
    | PageRequest
    | PeerRefused
    | End
    | MemoryLayout
    | LayoutAck
)


@dataclass(frozen=True, slots=True)
class _Form:
    """The layout of a message's body: fixed fields, then at most one field for the rest."""

    made: type[Message]
    fixed: struct.Struct
    names: tuple[str, ...]
    tail: str | None
    has_epoch: bool


def _form(made: type[Message], numbers: str, names: str, tail: str | None = None) -> _Form:
    has_epoch = "epoch" in made.__dataclass_fields__
    return _Form(made, struct.Struct(f">{numbers}"), tuple(names.split()), tail, has_epoch)


_FORMS = {
    form.made.kind: form
    for form in (
        _form(Hello, "Q", "captured", "session"),
        _form(HelloAck, "Q", "committed", "session"),
        _form(Pages, "I", "file", "data"),
        _form(Writes, "I", "disk", "data"),
        _form(DeviceState, "", "", "data"),
        _form(EpochEnd, "QI16s?d", "base messages digest final taken"),
        _form(Ack, "", ""),
        _form(Heartbeat, "d", "sent", "note"),
        _form(Digests, "iQ", "file first", "data"),
        _form(PageRequest, "iQI", "file first count"),
        _form(PeerRefused, "", "", "why"),
        _form(End, "", "", "why"),
        _form(MemoryLayout, "", "", "data"),
        _form(LayoutAck, "", ""),
    )
}
_TEXTS = ("session", "why")


def digest_of(part: Part) -> bytes:
    """Return the digest of a part of an epoch, over kind, epoch and body; 16 bytes.

    Raises ValueError for values that cannot be encoded.
    """
    return digest(_PART.pack(part.kind, part.epoch), *body(part))


def digest(*pieces: bytes | memoryview) -> bytes:
    """Return the BLAKE3 digest of the concatenated pieces; 16 bytes."""
    told = blake3()
    for piece in pieces:
        told.update(piece)
    return told.digest(DIGEST)


def body(message: Message) -> tuple[bytes, bytes]:
    """Return a message's body in two pieces. The larger piece is not copied.

    Raises ValueError for values that cannot be encoded.
    """
    form = _FORMS[message.kind]
    if wrong := _wrong(message):
        raise ValueError(wrong)
    try:
        fixed = form.fixed.pack(*(getattr(message, name) for name in form.names))
    except struct.error as exc:
        raise ValueError(f"a field of {type(message).__name__} is out of range: {exc}") from exc
    tail = b"" if form.tail is None else getattr(message, form.tail)
    return fixed, tail.encode() if isinstance(tail, str) else tail


def _wrong(message: Message) -> str | None:
    """Return why a message's values are invalid, or None. Number ranges are not checked here."""
    match message:
        case EpochEnd(digest=told) if len(told) != DIGEST:
            return f"a digest of {len(told)} bytes instead of {DIGEST}"
        case EpochEnd(taken=at) | Heartbeat(sent=at) if not math.isfinite(at):
            return f"invalid time {at}"
        case Digests(data=data) if len(data) % 8:
            return f"digests of {len(data)} bytes, not a multiple of 8"
    return None


def parse(kind: int, epoch: int, told: memoryview) -> Message:
    """Parse the body of a message. The message keeps no view of the body. Raises Damaged."""
    form = _FORMS.get(kind)
    if form is None:
        raise damaged(f"a message of unknown kind {kind}")
    name, size = form.made.__name__, form.fixed.size
    if len(told) < size or (form.tail is None and len(told) > size):
        raise damaged(f"a message of type {name} with a wrong length of {len(told)} bytes")
    values: dict[str, Any] = dict(zip(form.names, form.fixed.unpack_from(told), strict=True))
    if form.has_epoch:
        values["epoch"] = epoch
    elif epoch:
        raise damaged(f"a message of type {name} with epoch {epoch}; this type has no epoch")
    if form.tail is not None:
        tail = bytes(told[size:])
        try:
            values[form.tail] = tail.decode() if form.tail in _TEXTS else tail
        except UnicodeDecodeError as exc:
            raise damaged(f"a message of type {name} whose {form.tail} is not UTF-8") from exc
    message = form.made(**values)
    if wrong := _wrong(message):
        raise damaged(f"an invalid message of type {name}: {wrong}")
    return message


class Tally:
    """Counts the parts of an epoch and combines their digests, at both ends in the same way."""

    def __init__(self) -> None:
        self.count = 0
        self._running = blake3()

    def add(self, part: Part) -> None:
        self.count += 1
        self._running.update(digest_of(part))

    def digest(self) -> bytes:
        """Return the digest for `EpochEnd`: 16 bytes over the parts' digests, in order."""
        return self._running.digest(DIGEST)


class Order:
    """Checks that an epoch is complete and follows the last committed epoch."""

    def __init__(self, committed: int) -> None:
        """`committed`: the last committed epoch; 0: no epoch was committed."""
        self.committed = committed
        """The last committed epoch. An epoch counts as committed once its EpochEnd was taken: a
        backup that fails to commit creates a new Order."""
        self.open: int | None = None
        """The epoch whose EpochEnd has not been taken yet; None: no epoch is open."""
        self._tally = Tally()

    def take(self, message: Message) -> None:
        """Check the next message. Messages that belong to no epoch are always in order.

        Parts of epoch 0, the first copy, are in order until an epoch is committed. A part of a
        newer epoch discards the open epoch. Raises Replayed, OutOfOrder; in that case, the open
        epoch is discarded.
        """
        try:
            match message:
                case Pages() | Writes() | DeviceState():
                    self._part(message)
                case EpochEnd():
                    self._seal(message)
                case _:
                    pass
        except WireError:
            self.discard()
            raise

    def discard(self) -> None:
        """Discard the open epoch, as when the connection is lost: the epoch is sent again."""
        self.open = None
        self._tally = Tally()

    def _part(self, part: Part) -> None:
        if part.epoch == self.committed == 0:
            return
        self._not_committed(part.epoch)
        if self.open is not None and part.epoch < self.open:
            raise _out_of_order(
                f"a part of epoch {part.epoch} arrived after parts of epoch {self.open}"
            )
        if self.open != part.epoch:
            self.discard()
            self.open = part.epoch
        self._tally.add(part)

    def _seal(self, seal: EpochEnd) -> None:
        self._not_committed(seal.epoch)
        told = f"epoch {seal.epoch}"
        if seal.base != self.committed:
            raise _out_of_order(
                f"{told} follows epoch {seal.base}, but epoch {self.committed} was committed"
            )
        if self.open not in (None, seal.epoch):
            raise _out_of_order(f"{told} was sealed, but epoch {self.open} is open")
        if seal.messages != self._tally.count:
            raise _out_of_order(
                f"{told} has {seal.messages} parts, but {self._tally.count} arrived"
            )
        if seal.digest != self._tally.digest():
            raise _out_of_order(f"the parts of {told} do not match its digest")
        self.discard()
        self.committed = seal.epoch

    def _not_committed(self, epoch: int) -> None:
        if epoch <= self.committed:
            raise Replayed(
                f"a message of epoch {epoch} arrived, but epoch {self.committed} is already"
                " committed",
                hint="an agent that was replaced may still be running; the message was ignored",
            )


def damaged(what: str) -> Damaged:
    """Return the error for invalid data; `what` completes "the other end sent …"."""
    return Damaged(f"the other end sent {what}", hint=AGAIN)


def _out_of_order(what: str) -> OutOfOrder:
    return OutOfOrder(what, hint=AGAIN)
