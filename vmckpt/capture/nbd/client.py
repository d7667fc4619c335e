"""An NBD client: reads a disk with many concurrent requests, and queries which parts have changed.

The server is not trusted: sizes and counts in its replies are checked against the requests. Only
one thread at a time may use a client.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.protocol import NbdSocket, Nonsense, Place, Tcp, Unix, agree
from vmckpt.errors import HypervisorError
from vmckpt.units import MIB, Seconds

_MOST_STATUS = 4 + (wire.EXTENT.size << 20)
_STATUS_STEP = 1 << 30
_MOST_REQUESTS = 64
_MOST_ERROR = 4096 + 6 + 8


@dataclass(frozen=True, slots=True)
class Piece:
    """The result of one read."""

    offset: int
    length: int
    data: memoryview | None
    """The bytes read; None if the server reported only zeros."""

    def content(self) -> memoryview:
        """Return the bytes, even if they are all zeros."""
        return memoryview(bytes(self.length)) if self.data is None else self.data


@dataclass(frozen=True, slots=True)
class Extent:
    """Consecutive bytes with the same flags in a metadata context."""

    offset: int
    length: int
    flags: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(slots=True)
class _Request:
    """A request that is not finished yet."""

    offset: int
    length: int
    status: bool
    """Whether the request is for block status rather than data."""
    left: int = 0
    """Number of bytes that no reply has covered yet."""
    buffer: bytearray | None = None
    extents: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    error: str | None = None
    done: bool = False


class Client:
    """A connection to one export. Use as `with Client(...) as client`.

    The methods raise HypervisorError with the host's name, and the connection is then closed.
    """

    def __init__(
        self,
        place: Place,
        export: str,
        *,
        host: str,
        contexts: Sequence[str] = (),
        limit: Seconds = Seconds(60.0),
    ) -> None:
        """Connect, and select an export.

        `contexts`: metadata contexts to request; contexts that the server lacks are left out.
        `limit`: maximum time to wait for any data from the server. Raises BadInput if a name is too
        long, and HypervisorError.
        """
        self.export = export
        self._said = _Said(f"{host}: disk {export} over NBD ({place})", host, limit)
        self._pending: dict[int, _Request] = {}
        self._next = 1
        with self._said.safely():
            self._line = NbdSocket(_connect(place, limit))
        with self._safely():
            agreed = agree(self._line, export, contexts)
        self.size, self.read_only = agreed.size, agreed.read_only
        self.contexts: Mapping[str, int] = agreed.contexts
        self._structured, self._most = agreed.structured, agreed.most

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; does nothing if the connection is already closed."""
        with suppress(OSError):
            self._line.send(wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, wire.CMD_DISC, 0, 0, 0))
        self._line.socket.close()

    def read(self, offset: int, length: int) -> bytes:
        """Read bytes at an offset. Raises ValueError if they are beyond the export's end."""
        return b"".join(piece.content() for piece in self.read_many([(offset, length)]))

    def read_many(
        self, pieces: Iterable[tuple[int, int]], *, window: int = 4 * MIB
    ) -> Iterator[Piece]:
        """Read pieces, given as (offset, length), and yield them in that order.

        At most `window` bytes are requested at once. A piece that is longer than the server's limit
        is yielded in several pieces. Raises ValueError for bytes beyond the export's end.
        """
        waiting: deque[_Request] = deque()
        under_way = 0
        for offset, length in self._cut(pieces):
            while waiting and (under_way + length > window or len(waiting) >= _MOST_REQUESTS):
                under_way -= waiting[0].length
                yield self._finished(waiting.popleft())
            waiting.append(self._ask(offset, length, status=False))
            under_way += length
        while waiting:
            yield self._finished(waiting.popleft())

    def extents(self, context: str, offset: int = 0, length: int | None = None) -> Iterator[Extent]:
        """Yield the extents of a part of the disk in a metadata context, in order and without gaps.

        `length`: in bytes; None means up to the end of the disk. Raises KeyError for a context that
        was not granted, and ValueError for bytes beyond the end of the disk.
        """
        number = self.contexts[context]
        end = self._checked(offset, self.size - offset if length is None else length)
        last: Extent | None = None
        while offset < end:
            request = self._ask(offset, min(end - offset, _STATUS_STEP), status=True)
            self._await(request)
            said = request.extents.get(number)
            if said is None:
                with self._safely():
                    raise Nonsense(f"no block status for {context}")
            for count, flags in said:
                here = Extent(offset, min(count, end - offset), flags)
                offset = here.end
                if last is not None and last.flags == flags:
                    last = Extent(last.offset, last.length + here.length, flags)
                    continue
                if last is not None:
                    yield last
                last = here
        if last is not None:
            yield last

    def _cut(self, pieces: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for first, length in pieces:
            end = self._checked(first, length)
            for offset in range(first, end, self._most):
                yield offset, min(self._most, end - offset)

    def _checked(self, offset: int, length: int) -> int:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(
                f"{self.export}: {length} bytes at offset {offset} exceed the size of {self.size}"
            )
        return offset + length

    def _finished(self, request: _Request) -> Piece:
        self._await(request)
        data = None if request.buffer is None else memoryview(request.buffer)
        return Piece(request.offset, request.length, data)

    def _ask(self, offset: int, length: int, *, status: bool) -> _Request:
        request = _Request(offset=offset, length=length, status=status, left=length)
        handle, self._next = self._next, self._next + 1
        kind = wire.CMD_BLOCK_STATUS if status else wire.CMD_READ
        order = wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, kind, handle, offset, length)
        with self._safely():
            self._line.send(order)
        self._pending[handle] = request
        return request

    def _await(self, request: _Request) -> None:
        with self._safely():
            while not request.done:
                self._take_answer()
            if request.error is not None:
                what = "querying" if request.status else "reading"
                end = request.offset + request.length
                raise self._said.error(f"{what} bytes {request.offset} to {end}: {request.error}")

    def _take_answer(self) -> None:
        head = self._line.take(wire.SIMPLE.size)
        (magic,) = struct.unpack_from(">I", head)
        if magic == wire.STRUCTURED_MAGIC and self._structured:
            self._take_chunk(head + self._line.take(wire.STRUCTURED.size - len(head)))
        elif magic == wire.SIMPLE_MAGIC:
            self._take_simple(head)
        else:
            raise Nonsense("reply with an invalid magic number")

    def _asked(self, handle: int) -> _Request:
        if handle not in self._pending:
            raise Nonsense("reply to an unknown request")
        return self._pending[handle]

    def _end(self, handle: int, error: str | None = None) -> None:
        request = self._pending.pop(handle)
        request.error = request.error or error
        request.done = True

    def _take_simple(self, head: bytes) -> None:
        _, error, handle = wire.SIMPLE.unpack(head)
        request = self._asked(handle)
        if not error:
            if request.status or self._structured:
                raise Nonsense("simple reply instead of a structured reply")
            request.buffer = bytearray(request.length)
            self._line.fill(memoryview(request.buffer))
        self._end(handle, _words(error) if error else None)

    def _take_chunk(self, head: bytes) -> None:
        _, flags, kind, handle, length = wire.STRUCTURED.unpack(head)
        request = self._asked(handle)
        if kind & wire.CHUNK_ERROR:
            self._take_error(request, kind, length)
        elif kind == wire.CHUNK_DATA and not request.status:
            self._take_data(request, length)
        elif kind == wire.CHUNK_HOLE and not request.status:
            self._take_hole(request, length)
        elif kind == wire.CHUNK_STATUS and request.status:
            self._take_status(request, length)
        elif kind != wire.CHUNK_NONE or length or not flags & wire.CHUNK_DONE:
            raise Nonsense(f"unexpected chunk of type {kind} with {length} bytes")
        if flags & wire.CHUNK_DONE:
            if request.left and not request.status and request.error is None:
                raise Nonsense(f"{request.left} bytes fewer than requested")
            self._end(handle)

    def _take_error(self, request: _Request, kind: int, length: int) -> None:
        if not 6 <= length <= _MOST_ERROR:
            raise Nonsense(f"error with an invalid length of {length} bytes")
        body = self._line.take(length)
        number, count = struct.unpack_from(">IH", body)
        said = body[6 : 6 + min(count, 200)].decode(errors="replace")
        said = "".join(letter if letter.isprintable() else " " for letter in said).strip()
        known = (wire.CHUNK_ERROR_PLAIN, wire.CHUNK_ERROR_OFFSET)
        request.error = said or _words(number if kind in known else 0)

    def _place_for(self, request: _Request, offset: int, length: int) -> int:
        """Return the position of a chunk in the request's buffer. Raises Nonsense."""
        begin = offset - request.offset
        if begin < 0 or begin + length > request.length or not 0 < length <= request.left:
            raise Nonsense("data that was not requested")
        request.left -= length
        return begin

    def _take_data(self, request: _Request, length: int) -> None:
        if length <= 8:
            raise Nonsense("chunk without data")
        (offset,) = struct.unpack(">Q", self._line.take(8))
        begin = self._place_for(request, offset, length - 8)
        if request.buffer is None:
            request.buffer = bytearray(request.length)
        self._line.fill(memoryview(request.buffer)[begin : begin + length - 8])

    def _take_hole(self, request: _Request, length: int) -> None:
        if length != 12:
            raise Nonsense("malformed hole")
        offset, count = struct.unpack(">QI", self._line.take(12))
        self._place_for(request, offset, count)

    def _take_status(self, request: _Request, length: int) -> None:
        if length < 4 + wire.EXTENT.size or length > _MOST_STATUS or length % 8 != 4:
            raise Nonsense(f"block status with an invalid length of {length} bytes")
        body = self._line.take(length)
        (number,) = struct.unpack_from(">I", body)
        if number not in self.contexts.values() or number in request.extents:
            raise Nonsense("block status that was not requested")
        found = list(wire.EXTENT.iter_unpack(body[4:]))
        if any(not count for count, _ in found):
            raise Nonsense("block status with a length of 0")
        request.extents[number] = found

    @contextmanager
    def _safely(self) -> Iterator[None]:
        """Convert errors to HypervisorError, and close the connection after any error."""
        try:
            with self._said.safely():
                yield
        except BaseException:
            self._line.socket.close()
            raise


@dataclass(frozen=True, slots=True)
class _Said:
    """Converts errors of a connection to HypervisorError."""

    where: str
    host: str
    limit: Seconds

    def error(self, why: str) -> HypervisorError:
        return HypervisorError(f"{self.where}: {why}", host=self.host)

    @contextmanager
    def safely(self) -> Iterator[None]:
        try:
            yield
        except wire.NbdRefused as exc:
            raise self.error(f"refused by the server: {exc}") from exc
        except Nonsense as exc:
            raise self.error(f"invalid reply from the server: {exc}") from exc
        except wire.Gone as exc:
            raise self.error("the server closed the connection") from exc
        except TimeoutError as exc:
            raise self.error(f"no answer within {self.limit:g} s") from exc
        except OSError as exc:
            raise self.error(exc.strerror or str(exc)) from exc


def _words(number: int) -> str:
    return os.strerror(number) if 0 < number < 200 else "unknown error"


def _connect(place: Place, limit: Seconds) -> socket.socket:
    match place:
        case Unix(path):
            made = socket.socket(socket.AF_UNIX)
            try:
                made.settimeout(limit)
                made.connect(path)
            except BaseException:
                made.close()
                raise
            return made
        case Tcp(host, port):
            made = socket.create_connection((host, port), timeout=limit)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
