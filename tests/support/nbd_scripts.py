"""NBD servers by a script, which begin as the protocol says, and a client for them."""

import socket
import struct
from collections.abc import Callable

from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client
from vmckpt.capture.nbd.protocol import Place
from vmckpt.units import Seconds


def client(place: Place, *contexts: str, limit: float = 5.0) -> Client:
    return Client(place, "vda", host="alpha", contexts=contexts, limit=Seconds(limit))


Talk = Callable[[socket.socket], None]


def take(sock: socket.socket, length: int) -> bytes:
    return wire.NbdSocket(sock).take(length)


def reply(sock: socket.socket, option: int, kind: int, body: bytes = b"") -> None:
    head = wire.OPTION_REPLY.pack(wire.OPTION_REPLY_MAGIC, option, kind, len(body))
    sock.sendall(head + body)


def greet(sock: socket.socket) -> None:
    sock.sendall(wire.GREETING + struct.pack(">H", wire.FIXED_NEWSTYLE | wire.NO_ZEROES))
    take(sock, 4)


def next_option(sock: socket.socket) -> int:
    _, option, length = wire.OPTION.unpack(take(sock, wire.OPTION.size))
    take(sock, length)
    return int(option)
