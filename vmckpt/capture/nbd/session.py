"""One client of the NBD server: negotiate an export, and answer the client's requests."""

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.protocol import Gone, NbdSocket, Nonsense
from vmckpt.errors import VmckptError
from vmckpt.units import MIB

log = logging.getLogger("vmckpt.nbd")

Data: TypeAlias = bytes | bytearray | memoryview

_AT_ONCE = 4
"""Maximum number of concurrent reads per client."""
_WAITING = 16
_STEP = MIB
_MOST_OPTION = 65536
_MOST_OPTIONS = 1000
_MOST_EXTENTS = 8192
_CHOOSING = 30.0
"""Seconds to wait for data from a client during negotiation."""
_TAKING = 300.0
"""Seconds to wait for a client to receive a reply; a client may be paused for good reasons."""
_CONTEXT_NUMBER = 1

DATA, ZEROS, ABSENT = 0, 1, 2
"""Kinds of extents. ABSENT extents are reported as not allocated: qemu-img leaves them to the
backing file of a new image. They can still be read."""
_FLAGS = {DATA: 0, ZEROS: wire.HOLE | wire.ZERO, ABSENT: wire.HOLE}


@dataclass(frozen=True, slots=True)
class Export:
    """Readable data. Both functions are called from several threads."""

    size: int
    read: Callable[[int, int], Data]
    """Returns `length` bytes, given offset and length."""
    extents: Callable[[int, int], Iterable[tuple[int, int]]] | None = None
    """Yields (length, kind) for consecutive extents, given offset and length. The kind is DATA,
    ZEROS (or True) or ABSENT. None: any part of the export may contain data."""


@dataclass(frozen=True, slots=True)
class _Order:
    """A request from the client."""

    flags: int
    handle: int
    offset: int
    length: int


class Session:
    """A connected client, served by `run` until it disconnects or `hang_up` is called."""

    def __init__(self, line: NbdSocket, exports: Mapping[str, Export]) -> None:
        self._line = line
        self._exports = exports
        self._structured = False
        self._context_of: str | None = None
        """The export for which the client has selected base:allocation."""
        self._zeroes = True
        """Whether the client is old, and expects 124 zero bytes."""
        self._sending = threading.Lock()
        self._room = threading.Semaphore(_WAITING)

    def hang_up(self) -> None:
        """Close the connection, which ends `run`."""
        with suppress(OSError):
            self._line.socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Serve the client. Connection errors are only logged."""
        try:
            self._line.socket.settimeout(_CHOOSING)
            export = self._choose()
            if export is not None:
                # Between requests, a client may be silent indefinitely.
                self._line.socket.settimeout(None)
                seconds = struct.pack("ll", int(_TAKING), 0)
                self._line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
                with ThreadPoolExecutor(_AT_ONCE, "NBD read") as pool:
                    try:
                        self._serve(export, pool)
                    except BaseException:
                        self.hang_up()  # unblocks a thread that waits to send to the client
                        raise
        except (OSError, Gone, Nonsense, UnicodeDecodeError, struct.error) as exc:
            log.debug("NBD client disconnected: %s", exc or "the client closed the connection")
        finally:
            self._line.socket.close()

    # --- negotiation

    def _choose(self) -> Export | None:
        """Negotiate with the client. Returns the selected export; None if the client aborts.

        Raises Nonsense.
        """
        flags = wire.FIXED_NEWSTYLE | wire.NO_ZEROES
        self._line.send(wire.GREETING, struct.pack(">H", flags))
        (agreed,) = struct.unpack(">I", self._line.take(4))
        if agreed & ~flags:
            raise Nonsense(f"unknown client flags {agreed:#x}")
        self._zeroes = not agreed & wire.NO_ZEROES
        for _ in range(_MOST_OPTIONS):
            magic, option, length = wire.OPTION.unpack(self._line.take(wire.OPTION.size))
            if magic != wire.OPTION_MAGIC or length > _MOST_OPTION:
                raise Nonsense("malformed option")
            body = self._line.take(length)
            if option == wire.OPT_ABORT:
                self._reply(option, wire.REP_ACK)
                return None
            if option == wire.OPT_EXPORT_NAME:
                return self._old_choice(body)
            if (export := self._option(option, body)) is not None:
                return export
        raise Nonsense("too many options")

    def _option(self, option: int, body: bytes) -> Export | None:
        """Answer an option. Returns the export if the option selected one."""
        match option:
            case wire.OPT_GO | wire.OPT_INFO:
                return self._go(option, body)
            case wire.OPT_STRUCTURED_REPLY if not body:
                self._structured = True
                self._reply(option, wire.REP_ACK)
            case wire.OPT_LIST if not body:
                for name in self._exports:
                    if name:
                        self._reply(option, wire.REP_SERVER, _counted(name))
                self._reply(option, wire.REP_ACK)
            case wire.OPT_LIST_META_CONTEXT | wire.OPT_SET_META_CONTEXT:
                self._contexts(option, body)
            case wire.OPT_STRUCTURED_REPLY | wire.OPT_LIST:
                self._reply(option, wire.REP_ERR_INVALID)
            case _:
                self._reply(option, wire.REP_ERR_UNSUP)
        return None

    def _reply(self, option: int, kind: int, body: bytes = b"") -> None:
        head = wire.OPTION_REPLY.pack(wire.OPTION_REPLY_MAGIC, option, kind, len(body))
        self._line.send(head, body)

    def _flags(self) -> int:
        flags = wire.HAS_FLAGS | wire.READ_ONLY | wire.CAN_MULTI_CONN
        return flags | wire.SEND_DF if self._structured else flags

    def _old_choice(self, body: bytes) -> Export:
        name = body.decode()
        if name not in self._exports:
            raise Nonsense(f"no export {name[:40]!r}")
        said = struct.pack(">QH", self._exports[name].size, self._flags())
        self._line.send(said + bytes(124) if self._zeroes else said)
        self._keep_context(name)
        return self._exports[name]

    def _go(self, option: int, body: bytes) -> Export | None:
        name, at = _take_text(body, 0)
        (count,) = struct.unpack_from(">H", body, at)
        wanted = struct.unpack_from(f">{count}H", body, at + 2)
        if name not in self._exports:
            self._reply(option, wire.REP_ERR_UNKNOWN, b"no such export")
            return None
        export = self._exports[name]
        info = wire.EXPORT_INFO.pack(wire.INFO_EXPORT, export.size, self._flags())
        self._reply(option, wire.REP_INFO, info)
        if wire.INFO_BLOCK_SIZE in wanted:
            sizes = wire.BLOCK_INFO.pack(wire.INFO_BLOCK_SIZE, 1, 65536, wire.MOST_READ)
            self._reply(option, wire.REP_INFO, sizes)
        self._reply(option, wire.REP_ACK)
        if option == wire.OPT_INFO:
            return None
        self._keep_context(name)
        return export

    def _keep_context(self, name: str) -> None:
        if self._context_of != name:
            self._context_of = None

    def _contexts(self, option: int, body: bytes) -> None:
        name, at = _take_text(body, 0)
        (count,) = struct.unpack_from(">I", body, at)
        at += 4
        queries = []
        for _ in range(min(count, _MOST_OPTION)):
            query, at = _take_text(body, at)
            queries.append(query)
        setting = option == wire.OPT_SET_META_CONTEXT
        if setting:
            self._context_of = None
        if not self._structured or name not in self._exports:
            refusal = wire.REP_ERR_UNKNOWN if self._structured else wire.REP_ERR_INVALID
            self._reply(option, refusal)
            return
        if wire.ALLOCATION in queries or (not setting and (not queries or "base:" in queries)):
            number = _CONTEXT_NUMBER if setting else 0
            said = struct.pack(">I", number) + wire.ALLOCATION.encode()
            self._reply(option, wire.REP_META_CONTEXT, said)
            if setting:
                self._context_of = name
        self._reply(option, wire.REP_ACK)

    # --- serving

    def _serve(self, export: Export, pool: ThreadPoolExecutor) -> None:
        while True:
            head = self._line.take(wire.REQUEST.size)
            magic, flags, kind, handle, offset, length = wire.REQUEST.unpack(head)
            order = _Order(flags, handle, offset, length)
            if magic != wire.REQUEST_MAGIC:
                raise Nonsense("request with an invalid magic number")
            if kind == wire.CMD_DISC:
                return
            if kind == wire.CMD_WRITE:
                if length > wire.MOST_READ:
                    raise Nonsense(f"write of {length} bytes; the limit is {wire.MOST_READ}")
                self._line.pass_over(length)
            work, refusal = self._work(export, kind, order)
            if work is None:
                self._refuse(order, refusal)
                continue
            self._room.acquire()
            pool.submit(work).add_done_callback(self._done)

    def _work(
        self, export: Export, kind: int, order: _Order
    ) -> tuple[Callable[[], None] | None, int]:
        """Return the function that answers a request, or None and the error number of a refusal."""
        status = kind == wire.CMD_BLOCK_STATUS
        if kind in (wire.CMD_WRITE, wire.CMD_TRIM, wire.CMD_WRITE_ZEROES):
            return None, wire.EPERM
        if kind != wire.CMD_READ and not (status and self._context_of is not None):
            return None, wire.EINVAL
        if not order.length or order.offset + order.length > export.size:
            return None, wire.EINVAL
        if status:
            return (lambda: self._answer(order, lambda: self._status(export, order))), 0
        single = bool(order.flags & wire.FLAG_DF)
        if order.length > (_STEP if single else wire.MOST_READ):
            return None, wire.EOVERFLOW
        if self._structured:
            return (lambda: self._answer(order, lambda: self._chunks(export, order))), 0
        return (lambda: self._plain(export, order)), 0

    def _done(self, future: Future[None]) -> None:
        self._room.release()
        if not future.cancelled() and (exc := future.exception()) is not None:
            if not isinstance(exc, OSError):  # an OSError means that the client is gone
                log.error("NBD: %s: %s", type(exc).__name__, exc)
            self.hang_up()

    def _refuse(self, order: _Order, number: int, why: str = "") -> None:
        if not self._structured:
            with self._sending:
                self._line.send(wire.SIMPLE.pack(wire.SIMPLE_MAGIC, number, order.handle))
            return
        said = why.encode()[:1000]
        body = struct.pack(">IH", number, len(said)) + said
        self._chunk(order, wire.CHUNK_ERROR_PLAIN, wire.CHUNK_DONE, body)

    def _chunk(self, order: _Order, kind: int, flags: int, *body: Data) -> None:
        length = sum(map(len, body))
        head = wire.STRUCTURED.pack(wire.STRUCTURED_MAGIC, flags, kind, order.handle, length)
        with self._sending:
            self._line.send(head, *body)

    def _answer(self, order: _Order, send: Callable[[], None]) -> None:
        """Send a structured reply; if reading fails midway, the reply ends with an error."""
        try:
            send()
        except (_Failed, VmckptError) as exc:
            log.warning("NBD: reading bytes %d+%d: %s", order.offset, order.length, exc)
            self._refuse(order, wire.EIO, str(exc))

    def _chunks(self, export: Export, order: _Order) -> None:
        single = bool(order.flags & wire.FLAG_DF)
        end = order.offset + order.length
        for offset, length, zero in _pieces(export, order.offset, order.length, whole=single):
            last = wire.CHUNK_DONE if offset + length == end else 0
            if zero:
                self._chunk(order, wire.CHUNK_HOLE, last, struct.pack(">QI", offset, length))
            else:
                data = _read(export, offset, length)
                self._chunk(order, wire.CHUNK_DATA, last, struct.pack(">Q", offset), data)

    def _plain(self, export: Export, order: _Order) -> None:
        """Send a simple reply; an error can only be reported before the first byte."""
        pieces = _pieces(export, order.offset, order.length, whole=False)
        try:
            contents = (
                bytes(length) if zero else _read(export, at, length) for at, length, zero in pieces
            )
            first = next(contents)
        except (_Failed, VmckptError) as exc:
            log.warning("NBD: reading bytes %d+%d: %s", order.offset, order.length, exc)
            self._refuse(order, wire.EIO)
            return
        with self._sending:
            self._line.send(wire.SIMPLE.pack(wire.SIMPLE_MAGIC, 0, order.handle), first)
            for content in contents:
                self._line.send(content)

    def _status(self, export: Export, order: _Order) -> None:
        most = 1 if order.flags & wire.FLAG_REQ_ONE else _MOST_EXTENTS
        body = [struct.pack(">I", _CONTEXT_NUMBER)]
        for _, length, kind in _merged(export, order.offset, order.length):
            body.append(wire.EXTENT.pack(length, _FLAGS[kind]))
            if len(body) > most:
                break
        self._chunk(order, wire.CHUNK_STATUS, wire.CHUNK_DONE, b"".join(body))


class _Failed(Exception):
    """A function of an export failed."""


def _read(export: Export, offset: int, length: int) -> Data:
    try:
        data = export.read(offset, length)
    except OSError as exc:
        raise _Failed(str(exc)) from exc
    if len(data) != length:
        raise _Failed(f"the export returned {len(data)} bytes instead of {length}")
    return data


def _merged(export: Export, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Yield (offset, length, kind) for a range, in order, with adjacent extents joined."""
    begin, end = offset, offset + length
    kind = DATA
    try:
        said = [(length, DATA)] if export.extents is None else export.extents(offset, length)
        for count, next_kind in said:
            if next_kind != kind and begin < offset:
                yield begin, offset - begin, kind
                begin = offset
            kind = next_kind
            offset = min(offset + count, end)
            if offset == end:
                break
    except OSError as exc:
        raise _Failed(str(exc)) from exc
    if begin < offset:
        yield begin, offset - begin, kind
    if offset < end:  # the export did not describe the rest
        yield offset, end - offset, DATA


def _pieces(
    export: Export, offset: int, length: int, *, whole: bool
) -> Iterator[tuple[int, int, bool]]:
    """Like `_merged`, but split data into steps, and yield whether each piece is zero.

    `whole`: yield the range as one piece of data.
    """
    if whole:
        yield offset, length, False
        return
    for first, count, kind in _merged(export, offset, length):
        zero = kind == ZEROS
        step = count if zero and count <= wire.MOST_READ else _STEP
        for at in range(first, first + count, step):
            yield at, min(step, first + count - at), zero


def _counted(text: str) -> bytes:
    data = text.encode()
    return struct.pack(">I", len(data)) + data


def _take_text(body: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from(">I", body, at)
    if at + 4 + length > len(body):
        raise Nonsense("text extends beyond its option")
    return body[at + 4 : at + 4 + length].decode(), at + 4 + length
