"""Frame messages, and find frames in received data. Pure.

A frame is b"VMCR", version u16, kind u16, token u64, epoch u64, length u32, 16 bytes of digest, and
the body; all numbers are big endian. The digest covers the rest of the frame, so that no part of a
frame is trusted before the complete frame has arrived. The magic and the version are at the same
position in every version.
"""

import struct
from collections.abc import Callable, Iterator

from vmckpt.replication.protocol.messages import (
    AGAIN,
    DIGEST,
    CutOff,
    Message,
    TooLong,
    TooNew,
    WireError,
    WrongToken,
    body,
    damaged,
    digest,
    parse,
)

MAGIC = b"VMCR"
VERSION = 1
MOST = 32 << 20
"""Maximum size of a body, in bytes."""

_HEADER = struct.Struct(">4sHHQQI")
_HEAD = _HEADER.size + DIGEST
_BEGINNING = struct.Struct(">4sH")


def parts(message: Message, *, token: int) -> tuple[bytes, bytes]:
    """Return the frame of a message in two pieces to send in order. A large body is not copied.

    Raises TooLong for a body above `MOST`, and ValueError for an invalid value.
    """
    fixed, tail = body(message)
    length = len(fixed) + len(tail)
    if length > MOST:
        raise _too_long(message.kind, length)
    epoch = getattr(message, "epoch", 0)
    try:
        header = _HEADER.pack(MAGIC, VERSION, message.kind, token, epoch, length)
    except struct.error as exc:
        raise ValueError(f"token {token} or epoch {epoch} is out of range: {exc}") from exc
    return header + digest(header, fixed, tail) + fixed, tail


class Reader:
    """Finds the messages in received data, which may arrive in pieces of any size.

    `token`: the token that every frame must carry, or a function that returns whether to accept a
    token. After an error, every further call of `feed` raises the same error.
    """

    def __init__(self, *, token: Callable[[int], bool] | int) -> None:
        self._token = token
        self._data = bytearray()
        self._broken: WireError | None = None

    def feed(self, data: bytes) -> list[Message]:
        """Add received data. Returns the messages that are now complete.

        Raises WireError. In that case, earlier messages in the same data are lost, as if the
        connection had ended a little earlier.
        """
        if self._broken is None:
            self._data += data
            try:
                return list(self._messages())
            except WireError as exc:
                self._broken = exc
                # The data cannot be cleared in place: the error's traceback still has views of it.
                self._data = bytearray()
        raise self._broken

    def close(self) -> None:
        """Handle the end of the connection. Raises CutOff if the last frame is incomplete."""
        if self._data:
            raise CutOff(f"the connection ended {len(self._data)} bytes into a message", hint=AGAIN)

    def _messages(self) -> Iterator[Message]:
        while (length := self._body_length()) is not None:
            end = _HEAD + length
            if len(self._data) < end:
                return
            with memoryview(self._data) as whole, whole[:end] as frame:
                message = self._message(frame)
            del self._data[:end]
            yield message

    def _body_length(self) -> int | None:
        """Return the length of the next body, or None while the length is unknown.

        Raises Damaged, TooNew, TooLong as early as possible.
        """
        begins = bytes(self._data[: len(MAGIC)])
        if not MAGIC.startswith(begins):
            raise damaged(f"a frame that begins with {begins!r}")
        if len(self._data) < _BEGINNING.size:
            return None
        _, version = _BEGINNING.unpack_from(self._data)
        if version > VERSION:
            raise TooNew(
                f"the guest's two agents use different versions of the protocol, {VERSION} and"
                f" {version}",
                hint="run vmckpt unprotect GUEST, then vmckpt protect GUEST --to HOST, to start"
                " both with one version",
            )
        if version < VERSION:
            raise damaged(f"a frame of version {version}")
        if len(self._data) < _HEAD:
            return None
        _, _, kind, _, _, length = _HEADER.unpack_from(self._data)
        if length > MOST:
            raise _too_long(kind, length)
        return int(length)

    def _message(self, frame: memoryview) -> Message:
        _, _, kind, token, epoch, _ = _HEADER.unpack_from(frame)
        with frame[: _HEADER.size] as header, frame[_HEAD:] as told:
            if digest(header, told) != frame[_HEADER.size : _HEAD]:
                raise damaged(f"a message of kind {kind} with a wrong digest")
            if not (token == self._token if isinstance(self._token, int) else self._token(token)):
                raise WrongToken(
                    f"the other end sent token {token}, which is not the lease's token",
                    hint="another host may have taken over; the message was ignored",
                )
            return parse(kind, epoch, told)


def _too_long(kind: int, length: int) -> TooLong:
    return TooLong(f"a message of kind {kind} has {length} bytes, but at most {MOST} are allowed")
