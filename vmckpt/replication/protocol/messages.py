"""What the agents of a protected guest tell each other: the messages, and an epoch's order. Pure.

The body of a message is its numbers, big endian, then what is left in one field. The epoch of a
message is not in its body but in its frame (see `framing`).
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from blake3 import blake3

from vmckpt.errors import VmckptError

DIGEST = 16
"""Bytes of a digest of a message, and of an epoch."""

_PART = struct.Struct(">HQ")
AGAIN = "the agents connect again by themselves; if it comes back, look at the network between them"


class WireError(VmckptError):
    """The other end sent what cannot be taken: the connection is closed, nothing of it is used."""


class Damaged(WireError):
    """It is not what anybody sent: wrong magic, digest or body."""


class CutOff(WireError):
    """The connection ended in the middle of a message."""


class WrongToken(WireError):
    """The sender holds no lease, or not any more."""


class Replayed(WireError):
    """It belongs to an epoch that is committed already."""


class OutOfOrder(WireError):
    """The epoch is not whole, or follows another one than the last that was committed."""


class TooNew(WireError):
    """A newer vmckpt speaks at the other end."""


class TooLong(WireError):
    """The body is larger than any that is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first word of the primary."""

    kind: ClassVar[int] = 1
    session: str
    """Id of the protection's session."""
    captured: int
    """The last epoch captured; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloAck:
    """The answer of the backup."""

    kind: ClassVar[int] = 2
    session: str
    committed: int
    """The last epoch committed; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Pages of one memory file, by `page_codec.encode`."""

    kind: ClassVar[int] = 3
    epoch: int
    file: int
    """Which of the guest's memory files, from 0."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """Records of one disk's write log, compressed with zstd."""

    kind: ClassVar[int] = 4
    epoch: int
    disk: int
    """Which of the guest's disks, from 0."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Device state, by `page_codec.encode_state`."""

    kind: ClassVar[int] = 5
    epoch: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The end of an epoch: all of it was sent, and the backup may commit it."""

    kind: ClassVar[int] = 6
    epoch: int
    base: int
    """The epoch that must be the last committed one, or the epoch's deltas do not hold."""
    messages: int
    """How many Pages, Writes and State belong to it."""
    digest: bytes
    """`Tally.digest` of them: 16 bytes."""
    final: bool
    """Whether the guest stands still after it: a planned switch."""
    taken: float
    """When it was captured, by the primary's wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The backup has committed the epoch."""

    kind: ClassVar[int] = 7
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A heartbeat, either way."""

    kind: ClassVar[int] = 8
    sent: float
    """When, by the sender's wall clock."""
    note: bytes
    """How the sender stands, as JSON; opaque here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of whole pages, or of 64 KiB pieces of a disk, that lie one behind the other."""

    kind: ClassVar[int] = 9
    file: int
    """Which memory file, from 0; of a disk it is -1 - its number."""
    first: int
    """Number of the first page or piece."""
    data: bytes
    """8 bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRequest:
    """Asks for Digests."""

    kind: ClassVar[int] = 10
    file: int
    first: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """The other end will not go on; the connection is closed after it."""

    kind: ClassVar[int] = 11
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The protection has ended: the backup says so, too, and removes its standby."""

    kind: ClassVar[int] = 12
    why: str


Part: TypeAlias = Pages | Writes | DeviceState
"""What an epoch is made of."""
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
)


@dataclass(frozen=True, slots=True)
class _Form:
    """How a message lies in its body: numbers, then what is left in one field."""

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
    )
}
_TEXTS = ("session", "why")


def digest_of(part: Part) -> bytes:
    """What identifies one part of an epoch: kind, epoch and body; 16 bytes."""
    return digest(_PART.pack(part.kind, part.epoch), *body(part))


def digest(*pieces: bytes | memoryview) -> bytes:
    """BLAKE3 over all pieces as if they were one; 16 bytes."""
    told = blake3()
    for piece in pieces:
        told.update(piece)
    return told.digest(DIGEST)


def body(message: Message) -> tuple[bytes, bytes]:
    """A message's body in two pieces, the larger one not copied.

    Raises ValueError for what cannot be told.
    """
    form = _FORMS[message.kind]
    if wrong := _wrong(message):
        raise ValueError(wrong)
    try:
        fixed = form.fixed.pack(*(getattr(message, name) for name in form.names))
    except struct.error as exc:
        raise ValueError(f"a number of {type(message).__name__} has no room: {exc}") from exc
    tail = b"" if form.tail is None else getattr(message, form.tail)
    return fixed, tail.encode() if isinstance(tail, str) else tail


def _wrong(message: Message) -> str | None:
    """What is wrong with a message that has room for all its numbers."""
    match message:
        case EpochEnd(digest=told) if len(told) != DIGEST:
            return f"a digest of {len(told)} bytes instead of {DIGEST}"
        case EpochEnd(taken=at) | Heartbeat(sent=at) if not math.isfinite(at):
            return f"{at} is no time"
        case Digests(data=data) if len(data) % 8:
            return f"{len(data)} bytes are no digests of 8 bytes each"
    return None


def parse(kind: int, epoch: int, told: memoryview) -> Message:
    """The message of a body, of which nothing is kept. Raises Damaged if that cannot be one."""
    form = _FORMS.get(kind)
    if form is None:
        raise damaged(f"a message of kind {kind}, which there is not")
    name, size = form.made.__name__, form.fixed.size
    if len(told) < size or (form.tail is None and len(told) > size):
        raise damaged(f"{name} of {len(told)} bytes")
    values: dict[str, Any] = dict(zip(form.names, form.fixed.unpack_from(told), strict=True))
    if form.has_epoch:
        values["epoch"] = epoch
    elif epoch:
        raise damaged(f"{name} of epoch {epoch}")
    if form.tail is not None:
        tail = bytes(told[size:])
        try:
            values[form.tail] = tail.decode() if form.tail in _TEXTS else tail
        except UnicodeDecodeError as exc:
            raise damaged(f"{name} whose {form.tail} is no text") from exc
    message = form.made(**values)
    if wrong := _wrong(message):
        raise damaged(f"{name}: {wrong}")
    return message


class Tally:
    """Counts the parts of an epoch and sums up their digests, at both ends alike."""

    def __init__(self) -> None:
        self.count = 0
        self._running = blake3()

    def add(self, part: Part) -> None:
        self.count += 1
        self._running.update(digest_of(part))

    def digest(self) -> bytes:
        """For `EpochEnd`: 16 bytes over the parts' digests, in their order."""
        return self._running.digest(DIGEST)


class Order:
    """Whether an epoch may be committed: it is whole, and follows the last one that was."""

    def __init__(self, committed: int) -> None:
        """`committed`: the last epoch committed; 0: none."""
        self.committed = committed
        """An EpochEnd that was taken counts as committed: a backup that fails to commit makes a new
        Order."""
        self.open: int | None = None
        """The epoch of which parts were taken, and no EpochEnd yet."""
        self._tally = Tally()

    def take(self, message: Message) -> None:
        """Look at the next message; those that belong to no epoch are always in order.

        Parts of epoch 0, the bulk copy, are so until an epoch is committed. A part of a newer epoch
        forgets the open one. Raises Replayed, OutOfOrder; the open epoch is forgotten then.
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
        """Forget the open epoch: the connection ended, and it will be sent again."""
        self.open = None
        self._tally = Tally()

    def _part(self, part: Part) -> None:
        if part.epoch == self.committed == 0:
            return
        self._not_committed(part.epoch)
        if self.open is not None and part.epoch < self.open:
            raise _out_of_order(f"a part of epoch {part.epoch} came after some of {self.open}")
        if self.open != part.epoch:
            self.discard()
            self.open = part.epoch
        self._tally.add(part)

    def _seal(self, seal: EpochEnd) -> None:
        self._not_committed(seal.epoch)
        told = f"epoch {seal.epoch}"
        if seal.base != self.committed:
            raise _out_of_order(f"{told} follows {seal.base}, but {self.committed} was committed")
        if self.open not in (None, seal.epoch):
            raise _out_of_order(f"{told} was sealed, but epoch {self.open} is open")
        if seal.messages != self._tally.count:
            raise _out_of_order(f"{told} has {seal.messages} parts; {self._tally.count} came")
        if seal.digest != self._tally.digest():
            raise _out_of_order(f"what came of {told} is not what was sealed")
        self.discard()
        self.committed = seal.epoch

    def _not_committed(self, epoch: int) -> None:
        if epoch <= self.committed:
            raise Replayed(
                f"a message of epoch {epoch} came, but {self.committed} is committed",
                hint="an agent that has been replaced may still run; see vmckpt status",
            )


def damaged(what: str) -> Damaged:
    """The error for what the other end sent."""
    return Damaged(f"the other end sent {what}", hint=AGAIN)


def _out_of_order(what: str) -> OutOfOrder:
    return OutOfOrder(what, hint=AGAIN)
