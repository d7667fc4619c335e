"""The format of a write log: a guest's writes to a disk in order, as records with headers. Pure.

This module needs only the standard library, since the nbdkit plugin runs under Debian's own Python.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

DATA, ZEROS, TRIM = 0, 1, 2
_KINDS = (DATA, ZEROS, TRIM)

HEADER = struct.Struct(">QIB3s")
"""Offset, length, kind, three zero bytes. The content follows if the kind is DATA."""
_PAD = bytes(3)

LONGEST = 1 << 20
"""Maximum number of bytes of data in a record; a longer write becomes several records."""
FURTHEST = (1 << 32) - 1
"""Maximum number of bytes that a record without data may cover."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the log."""

    offset: int
    length: int
    kind: int
    """DATA, ZEROS (the range reads as zeros) or TRIM (the range was discarded)."""
    data: memoryview | None
    """The data of a DATA record; None for the other kinds."""

    @property
    def end(self) -> int:
        return self.offset + self.length


def header(offset: int, length: int, kind: int = DATA) -> bytes:
    """Return the header of a record. Raises ValueError if a value is out of range."""
    if kind not in _KINDS:
        raise ValueError(f"invalid record: kind {kind}")
    most = LONGEST if kind == DATA else FURTHEST
    if not 0 < length <= most or not 0 <= offset < 1 << 63:
        raise ValueError(f"invalid record: {length} bytes at {offset}")
    return HEADER.pack(offset, length, kind, _PAD)


def records(data: Buffer) -> Iterator[Record]:
    """Yield the records in `data` without copying it.

    Raises ValueError at an invalid record, also if the last record is truncated.
    """
    view, here = memoryview(data), 0
    while here < len(view):
        record, here = _next(view, here)
        if record is None:
            raise ValueError(f"a record is truncated after {len(view) - here} bytes")
        yield record


def whole(data: Buffer) -> int:
    """Return the length of the complete records at the start of `data`.

    Raises ValueError at an invalid record.
    """
    view, here = memoryview(data), 0
    while here < len(view):
        record, here = _next(view, here)
        if record is None:
            break
    return here


def _next(view: memoryview, here: int) -> tuple[Record | None, int]:
    """Return the record at `here` and the offset after it; None and `here` if it is truncated.

    Raises ValueError if the record is invalid.
    """
    begin = here + HEADER.size
    if begin > len(view):
        return None, here
    offset, length, kind, pad = HEADER.unpack_from(view, here)
    if pad != _PAD:
        raise ValueError("invalid record header")
    header(offset, length, kind)
    if kind != DATA:
        return Record(offset, length, kind, None), begin
    if begin + length > len(view):
        return None, here
    return Record(offset, length, kind, view[begin : begin + length]), begin + length
