"""Input of the snapshot bench: files that represent a guest's disk.

A lab guest's own disk is nearly empty. So the bench adds a disk with real files: those of this
Python installation, each at the beginning of a block, as in a file system.
"""

import random
import sys
from pathlib import Path

BLOCK = 4096
_PART = 1 << 20


def fill(path: Path, size: int, seed: int) -> int:
    """Create a disk of real files, three quarters full. Returns the size of the filled part."""
    files = [one for one in sorted(Path(sys.prefix).rglob("*")) if one.is_file()]
    random.Random(seed).shuffle(files)
    at = 0
    with path.open("wb") as disk:
        disk.truncate(size)
        for one in files:
            length = one.stat().st_size
            if at + length > size * 3 // 4:
                continue
            disk.seek(at)
            disk.write(one.read_bytes())
            at += -(-length // BLOCK) * BLOCK
    return at


def change(path: Path, filled: int, share: float, seed: int) -> None:
    """Change a hundred bytes in each of some blocks, in runs, as programs do."""
    rng = random.Random(seed)
    left = int(filled * share) // BLOCK
    with path.open("r+b") as disk:
        while left > 0:
            run = min(left, rng.randrange(1, 64))
            at = rng.randrange(0, filled // BLOCK - run) * BLOCK
            for block in range(at, at + run * BLOCK, BLOCK):
                disk.seek(block + rng.randrange(BLOCK - 100))
                disk.write(rng.randbytes(100))
            left -= run


def copy(source: Path, target: Path) -> None:
    """Make a sparse copy, in which zeros are holes."""
    with source.open("rb") as old, target.open("wb") as new:
        while part := old.read(_PART):
            if part.strip(b"\0"):
                new.write(part)
            else:
                new.seek(len(part), 1)
        new.truncate(source.stat().st_size)


def same(one: Path, other: Path) -> bool:
    """Return whether two files have the same contents."""
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while part := first.read(_PART):
            if part != second.read(_PART):
                return False
    return True
