"""The NBD protocol: constants, one end of a connection, and the client's half of the handshake.

Fixed newstyle negotiation, structured replies and block status are supported; 64-bit headers are
not. The constants are from the NBD project's doc/proto.md.
"""

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from vmckpt.errors import BadInput
from vmckpt.units import MIB

GREETING = b"NBDMAGIC" + b"IHAVEOPT"
OPTION_MAGIC = 0x49484156454F5054
OPTION_REPLY_MAGIC = 0x3E889045565A9
REQUEST_MAGIC = 0x25609513
SIMPLE_MAGIC = 0x67446698
STRUCTURED_MAGIC = 0x668E33EF

# Handshake flags of both sides.
FIXED_NEWSTYLE, NO_ZEROES = 1, 2

OPT_EXPORT_NAME, OPT_ABORT, OPT_LIST = 1, 2, 3
OPT_INFO, OPT_GO, OPT_STRUCTURED_REPLY = 6, 7, 8
OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT = 9, 10

REP_ACK, REP_SERVER, REP_INFO, REP_META_CONTEXT = 1, 2, 3, 4
REP_ERROR = 1 << 31
REP_ERR_UNSUP, REP_ERR_INVALID = REP_ERROR | 1, REP_ERROR | 3
REP_ERR_UNKNOWN, REP_ERR_TOO_BIG = REP_ERROR | 6, REP_ERROR | 9
REFUSALS = {
    1: "option not supported", 2: "forbidden by server policy", 3: "invalid request",
    4: "not supported on this platform", 5: "TLS required", 6: "no such export",
    7: "server is shutting down", 8: "block size must be requested", 9: "request too large",
}  # fmt: skip

INFO_EXPORT, INFO_BLOCK_SIZE = 0, 3

HAS_FLAGS, READ_ONLY, SEND_DF, CAN_MULTI_CONN = 1, 2, 128, 256

CMD_READ, CMD_WRITE, CMD_DISC, CMD_FLUSH, CMD_TRIM = 0, 1, 2, 3, 4
CMD_CACHE, CMD_WRITE_ZEROES, CMD_BLOCK_STATUS = 5, 6, 7
FLAG_DF, FLAG_REQ_ONE = 4, 8

CHUNK_DONE = 1
CHUNK_NONE, CHUNK_DATA, CHUNK_HOLE, CHUNK_STATUS = 0, 1, 2, 5
CHUNK_ERROR = 1 << 15
CHUNK_ERROR_PLAIN, CHUNK_ERROR_OFFSET = CHUNK_ERROR | 1, CHUNK_ERROR | 2

ALLOCATION = "base:allocation"
HOLE, ZERO = 1, 2
DIRTY = 1

EPERM, EIO, EINVAL, EOVERFLOW, ENOTSUP = 1, 5, 22, 75, 95

OPTION = struct.Struct(">QII")
OPTION_REPLY = struct.Struct(">QIII")
REQUEST = struct.Struct(">IHHQQI")
SIMPLE = struct.Struct(">IIQ")
STRUCTURED = struct.Struct(">IHHQI")
EXPORT_INFO = struct.Struct(">HQH")
BLOCK_INFO = struct.Struct(">HIII")
EXTENT = struct.Struct(">II")

MOST_READ = 32 << 20
"""Maximum length of one read that the protocol allows by default, in bytes."""


@dataclass(frozen=True, slots=True)
class Unix:
    """The address of a server on a unix socket."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Tcp:
    """The address of a server on a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


Place: TypeAlias = Unix | Tcp


class Gone(Exception):
    """The other end closed the connection."""


class Nonsense(Exception):
    """The other end violated the protocol."""


class NbdRefused(Exception):
    """The other end refused a request."""


class NbdSocket:
    """Sends and receives complete messages over a socket. The methods raise OSError and Gone."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send all parts. Small parts are joined; large ones are sent without a copy."""
        small = b""
        for part in parts:
            if len(part) > 65536:
                self.socket.sendall(small)
                self.socket.sendall(part)
                small = b""
            else:
                small += part
        if small:
            self.socket.sendall(small)

    def take(self, length: int) -> bytes:
        """Receive and return exactly `length` bytes. Raises Gone if the connection ends first."""
        if not length:
            return b""
        first = self.socket.recv(length)
        if len(first) == length:
            return first
        whole = bytearray(length)
        whole[: len(first)] = first
        self.fill(memoryview(whole)[len(first) :], begun=first != b"")
        return bytes(whole)

    def fill(self, room: memoryview, *, begun: bool = True) -> None:
        """Fill a buffer with received bytes.

        `begun`: False if an earlier call received no bytes, as the other end has closed the
        connection. Raises Gone if it closes the connection before the buffer is full.
        """
        if not begun:
            raise Gone
        filled = 0
        while filled < len(room):
            count = self.socket.recv_into(room[filled:])
            if not count:
                raise Gone
            filled += count

    def pass_over(self, length: int) -> None:
        """Receive and discard bytes, in small pieces."""
        while length:
            length -= len(self.take(min(length, 65536)))


_LARGEST = (1 << 63) - 1
_MOST_REPLY = 65536
"""Maximum length of one reply to an option, in bytes."""
_MOST_REPLIES = 256
_LONGEST_NAME = 4096


@dataclass(slots=True)
class Agreed:
    """The properties of an export, as negotiated with the server."""

    size: int = -1
    read_only: bool = False
    structured: bool = False
    contexts: dict[str, int] = field(default_factory=dict)
    """IDs of the granted metadata contexts on this connection, by name."""
    most: int = MIB
    """Maximum length of one read, in bytes."""


def agree(line: NbdSocket, export: str, contexts: Sequence[str]) -> Agreed:
    """Select an export, with those of the `contexts` that the server supports.

    Raises BadInput for a name that is too long, OSError, Gone, Nonsense and NbdRefused.
    """
    found = Agreed()
    _greet(line)
    found.structured = _option(line, OPT_STRUCTURED_REPLY, b"", _nothing) is None
    if contexts and found.structured:
        asked = struct.pack(">I", len(contexts)) + b"".join(map(_text, contexts))

        def take_context(kind: int, body: bytes) -> None:
            name, number = _context(kind, body)
            if name not in contexts or name in found.contexts or number in found.contexts.values():
                raise Nonsense("context that was not requested")
            found.contexts[name] = number

        _option(line, OPT_SET_META_CONTEXT, _text(export) + asked, take_context)
    wishes = _text(export) + struct.pack(">HH", 1, INFO_BLOCK_SIZE)
    refused = _option(line, OPT_GO, wishes, lambda kind, body: _facts(kind, body, found))
    if refused is not None:
        raise NbdRefused(refused)
    if found.size < 0:
        raise Nonsense("the size of the export is missing")
    return found


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) > _LONGEST_NAME:
        raise BadInput(f"{text[:40]!r}… is too long for NBD, which allows {_LONGEST_NAME} bytes")
    return struct.pack(">I", len(data)) + data


def _greet(line: NbdSocket) -> None:
    if line.take(len(GREETING)) != GREETING:
        raise Nonsense("the greeting is not from an NBD server")
    (flags,) = struct.unpack(">H", line.take(2))
    if not flags & FIXED_NEWSTYLE:
        raise Nonsense("the server is too old to negotiate options")
    line.send(struct.pack(">I", flags & (FIXED_NEWSTYLE | NO_ZEROES)))


def _option(
    line: NbdSocket, option: int, body: bytes, take: Callable[[int, bytes], None]
) -> str | None:
    """Request an option. Returns None if it was granted, otherwise the reason for the refusal.

    Raises Nonsense.
    """
    line.send(OPTION.pack(OPTION_MAGIC, option, len(body)), body)
    for _ in range(_MOST_REPLIES):
        magic, about, kind, length = OPTION_REPLY.unpack(line.take(OPTION_REPLY.size))
        if magic != OPTION_REPLY_MAGIC or about != option or length > _MOST_REPLY:
            raise Nonsense("reply that does not match the request")
        said = line.take(length)
        if kind == REP_ACK:
            return None
        if kind & REP_ERROR:
            return REFUSALS.get(kind & ~REP_ERROR, "no reason given")
        take(kind, said)
    raise Nonsense("too many replies")


def _nothing(_kind: int, _body: bytes) -> None:
    raise Nonsense("unexpected data in a reply")


def _context(kind: int, body: bytes) -> tuple[str, int]:
    if kind != REP_META_CONTEXT or len(body) < 4:
        raise Nonsense("malformed context")
    return body[4:].decode(errors="replace"), struct.unpack_from(">I", body)[0]


def _facts(kind: int, body: bytes, found: Agreed) -> None:
    if kind != REP_INFO or len(body) < 2:
        raise Nonsense("malformed information")
    (about,) = struct.unpack_from(">H", body)
    form = {INFO_EXPORT: EXPORT_INFO, INFO_BLOCK_SIZE: BLOCK_INFO}.get(about)
    if form is None:
        return  # the export's name or description
    if len(body) != form.size:
        raise Nonsense("malformed information")
    if about == INFO_EXPORT:
        _, found.size, flags = form.unpack(body)
        found.read_only = bool(flags & READ_ONLY)
        if found.size > _LARGEST:
            raise Nonsense(f"invalid disk size of {found.size} bytes")
    else:
        _, smallest, _, most = form.unpack(body)
        if not 0 < smallest <= 65536 or most < 65536:
            raise Nonsense(f"invalid block sizes of {smallest} to {most} bytes")
        found.most = min(found.most, most // 65536 * 65536)
