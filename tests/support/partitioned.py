"""Disks with partitions and marks of file systems."""

import struct
from collections.abc import Sequence

MIB = 1 << 20


def table(rows: Sequence[tuple[int, int, int]]) -> bytes:
    """A sector with a table of partitions: kind, first sector, sectors."""
    raw = b"".join(struct.pack("<B3xB3xII", 0, *row) for row in rows)
    return bytes(446) + raw.ljust(64, b"\0") + b"\x55\xaa"
