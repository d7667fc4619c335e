"""The numbers of the NBD protocol, and one end of a connection that speaks it.

Fixed newstyle negotiation, structured replies and block status; the 64-bit headers are not used.
"""

import socket
import struct
from dataclasses import dataclass
from typing import TypeAlias

GREETING = b"NBDMAGIC" + b"IHAVEOPT"
OPTION_MAGIC = 0x49484156454F5054
OPTION_REPLY_MAGIC = 0x3E889045565A9
REQUEST_MAGIC = 0x25609513
SIMPLE_MAGIC = 0x67446698
STRUCTURED_MAGIC = 0x668E33EF

# Handshake, from both sides.
FIXED_NEWSTYLE, NO_ZEROES = 1, 2

OPT_EXPORT_NAME, OPT_ABORT, OPT_LIST = 1, 2, 3
OPT_INFO, OPT_GO, OPT_STRUCTURED_REPLY = 6, 7, 8
OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT = 9, 10

REP_ACK, REP_SERVER, REP_INFO, REP_META_CONTEXT = 1, 2, 3, 4
REP_ERROR = 1 << 31
REP_ERR_UNSUP, REP_ERR_INVALID = REP_ERROR | 1, REP_ERROR | 3
REP_ERR_UNKNOWN, REP_ERR_TOO_BIG = REP_ERROR | 6, REP_ERROR | 9
REFUSALS = {
    1: "it does not know how", 2: "its rules forbid it", 3: "it takes the request for a wrong one",
    4: "it cannot do that here", 5: "it wants TLS first", 6: "it has no such export",
    7: "it is about to end", 8: "it wants block sizes to be asked for", 9: "it is too much",
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
"""What the protocol lets a client ask for at once."""


@dataclass(frozen=True, slots=True)
class Unix:
    """A server on a socket of this machine."""

    path: str

    def __str__(self) -> str:
        return self.path


@dataclass(frozen=True, slots=True)
class Tcp:
    """A server on a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


Place: TypeAlias = Unix | Tcp


class Gone(Exception):
    """The other end has closed the connection."""


class Nonsense(Exception):
    """The other end said what the protocol does not allow."""


class Refused(Exception):
    """The other end said no."""


class Line:
    """Whole messages over a socket. Raises OSError and Gone."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send all of it; a great part goes without being copied together with the small ones."""
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
        """So many bytes."""
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
        """Fill a buffer with what comes."""
        if not begun:
            raise Gone
        filled = 0
        while filled < len(room):
            count = self.socket.recv_into(room[filled:])
            if not count:
                raise Gone
            filled += count

    def pass_over(self, length: int) -> None:
        """Read bytes that nobody wants, few at a time."""
        while length:
            length -= len(self.take(min(length, 65536)))
