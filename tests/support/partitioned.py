"""Disks with partitions and marks of file systems."""

import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

MIB = 1 << 20


def table(rows: Sequence[tuple[int, int, int]]) -> bytes:
    """A sector with a table of partitions: kind, first sector, sectors."""
    raw = b"".join(struct.pack("<B3xB3xII", 0, *row) for row in rows)
    return bytes(446) + raw.ljust(64, b"\0") + b"\x55\xaa"


def with_files(tree: Path, disk: Path) -> bytes:
    """A disk of 16 MiB whose second partition is an ext4 with the files of a directory."""
    with disk.open("wb") as file:
        file.truncate(16 * MIB)
        file.write(table([(0x83, 2048, 2048), (0x83, 4096, 24576)]))
    make = ["mkfs.ext4", "-q", "-F", "-d", str(tree), "-E", f"offset={2 * MIB}", str(disk), "12m"]
    subprocess.run(make, check=True, env={**os.environ, "PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})
    return disk.read_bytes()
