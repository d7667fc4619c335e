"""What a guest wrote to a disk, in the order of the writes: records in a row, each with its header.

Only the standard library: the nbdkit plugin writes them under Debian's own Python.

Pure.
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
"""Bytes of content in one record; a longer write becomes several records."""
FURTHEST = (1 << 32) - 1
"""Bytes that one record of the other kinds covers."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One write."""

    offset: int
    length: int
    kind: int
    """DATA, ZEROS (the disk reads as zeros there) or TRIM (nobody needs what is there)."""
    data: memoryview | None
    """The content; None for the other kinds."""

    @property
    def end(self) -> int:
        return self.offset + self.length


def header(offset: int, length: int, kind: int = DATA) -> bytes:
    """What stands before a record's content. Raises ValueError if there is no such record."""
    if kind not in _KINDS:
        raise ValueError(f"no record is of kind {kind}")
    most = LONGEST if kind == DATA else FURTHEST
    if not 0 < length <= most or not 0 <= offset < 1 << 63:
        raise ValueError(f"no record has {length} bytes at {offset}")
    return HEADER.pack(offset, length, kind, _PAD)


def records(data: Buffer) -> Iterator[Record]:
    """The records in a row; their content is not copied.

    Raises ValueError where there is none, also where the last one is cut off.
    """
    view, here = memoryview(data), 0
    while here < len(view):
        record, here = _next(view, here)
        if record is None:
            raise ValueError(f"a record is cut off after {len(view) - here} bytes")
        yield record


def whole(data: Buffer) -> int:
    """How many bytes the whole records at the beginning have. Raises ValueError."""
    view, here = memoryview(data), 0
    while here < len(view):
        record, here = _next(view, here)
        if record is None:
            break
    return here


def _next(view: memoryview, here: int) -> tuple[Record | None, int]:
    """The record there and where the next one begins; None: its end is missing."""
    begin = here + HEADER.size
    if begin > len(view):
        return None, here
    offset, length, kind, pad = HEADER.unpack_from(view, here)
    if pad != _PAD:
        raise ValueError("a header that is none")
    header(offset, length, kind)
    if kind != DATA:
        return Record(offset, length, kind, None), begin
    if begin + length > len(view):
        return None, here
    return Record(offset, length, kind, view[begin : begin + length]), begin + length
