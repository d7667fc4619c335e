"""An NBD client that writes: many requests under way, and still as if one followed the other.

A server may do what is under way in any order; so a request that overlaps one of those waits for
it. As with Client every error is a HypervisorError, and ends the connection.
"""

from vmckpt.capture.nbd import protocol as wire
from vmckpt.capture.nbd.client import Client, _Request
from vmckpt.capture.nbd.protocol import Place
from vmckpt.replicate import writelog
from vmckpt.replicate.writelog import Buffer, Record
from vmckpt.units import MIB

_MOST_REQUESTS = 64
_LONGEST = 1 << 30
"""Bytes that one request without content covers."""

_WORDS = {
    wire.CMD_WRITE: "writing bytes",
    wire.CMD_WRITE_ZEROES: "writing zeros to bytes",
    wire.CMD_TRIM: "trimming bytes",
    wire.CMD_FLUSH: "flushing bytes",
}


class NbdWriter(Client):
    """One connection to one export that can be written. Use as `with NbdWriter(...) as disk`.

    A request that fails is told by a later call, at the latest by `flush`: what was written before
    a `flush` is on the disk after it. Reading waits for all that is under way.
    """

    def __init__(
        self,
        place: Place,
        export: str,
        *,
        host: str,
        window: int = 8 * MIB,
    ) -> None:
        """`window`: bytes of content under way."""
        super().__init__(place, export, host=host)
        self._window = window
        self._writing: dict[int, tuple[int, _Request]] = {}
        """What each request under way is, by its handle."""
        self._much = 0
        with self._safely():
            if self.read_only:
                raise wire.Refused("it can only be read")

    def apply(self, record: Record) -> None:
        """Do again what a record of the log says."""
        if record.data is not None:
            self.write(record.offset, record.data)
        elif record.kind == writelog.ZEROS:
            self.zeros(record.offset, record.length)
        else:
            self.trim(record.offset, record.length)

    def write(self, offset: int, data: Buffer) -> None:
        """Write these bytes."""
        view = memoryview(data)
        for begin, length in self._cut([(offset, len(view))]):
            part = view[begin - offset : begin - offset + length]
            self._order(wire.CMD_WRITE, begin, length, part)

    def zeros(self, offset: int, length: int) -> None:
        """Let so many bytes read as zeros."""
        self._without_content(wire.CMD_WRITE_ZEROES, offset, length)

    def trim(self, offset: int, length: int) -> None:
        """Nobody needs so many bytes any more."""
        self._without_content(wire.CMD_TRIM, offset, length)

    def flush(self) -> None:
        """Wait until all that was written is on the disk."""
        self.wait()
        self._order(wire.CMD_FLUSH, 0, 0)
        self.wait()

    def wait(self) -> None:
        """Wait for the answers to all that is under way."""
        while self._writing:
            self._take_one()

    def _without_content(self, kind: int, offset: int, length: int) -> None:
        end = self._checked(offset, length)
        for begin in range(offset, end, _LONGEST):
            self._order(kind, begin, min(_LONGEST, end - begin))

    def _order(self, kind: int, offset: int, length: int, data: Buffer = b"") -> None:
        while self._must_wait(offset, length, len(data)):
            self._take_one()
        handle, self._next = self._next, self._next + 1
        order = wire.REQUEST.pack(wire.REQUEST_MAGIC, 0, kind, handle, offset, length)
        with self._safely():
            self._line.send(order, data)
        self._pending[handle] = request = _Request(offset=offset, length=length, status=False)
        self._writing[handle] = kind, request
        self._much += len(data)

    def _must_wait(self, offset: int, length: int, much: int) -> bool:
        if len(self._writing) >= _MOST_REQUESTS or (much and self._much + much > self._window):
            return bool(self._writing)
        return any(
            one.offset < offset + length and offset < one.offset + one.length
            for _, one in self._writing.values()
        )

    def _ask(self, offset: int, length: int, *, status: bool) -> _Request:
        self.wait()
        return super()._ask(offset, length, status=status)

    def _take_one(self) -> None:
        """Take one answer, or a part of one. Raises HypervisorError for a request that failed."""
        with self._safely():
            self._take_answer()

    def _take_simple(self, head: bytes) -> None:
        _, error, handle = wire.SIMPLE.unpack(head)
        # Without content there is nothing that an answer of the simple form would lack.
        if handle in self._writing and not error:
            self._end(handle)
        else:
            super()._take_simple(head)

    def _end(self, handle: int, error: str | None = None) -> None:
        super()._end(handle, error)
        if handle not in self._writing:
            return
        kind, request = self._writing.pop(handle)
        if kind == wire.CMD_WRITE:
            self._much -= request.length
        if request.error is not None:
            end = request.offset + request.length
            raise self._said.error(f"{_WORDS[kind]} {request.offset} to {end}: {request.error}")
