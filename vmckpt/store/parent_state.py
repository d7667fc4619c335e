"""The parent state: data about a guest's last snapshot that makes the next snapshot incremental.

The host keeps maps, chunk digests and a hash (print) of every page. With the parent state and
access to the store, a user can read the last snapshot's chunks. This reveals nothing new, because
the guest itself is running on the same host. The parent state is only an optimisation: if it is
lost or damaged, the next snapshot reads the complete guest.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from vmckpt.store.format.chunk_map import ZERO, Digests, Kind, Map, nothing, units
from vmckpt.store.ingest import PRINT, Past, Prints
from vmckpt.units import Seconds

VERSION = 1
_PART = 4 << 20
_NEW = Seconds(60.0)
"""At this age, a draft has been locked by the process that created it."""
_DRAFTED = Seconds(86_400.0)
"""A draft of this age is abandoned, because no snapshot takes a day."""
_UNUSED = Seconds(100 * 86_400.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentState:
    """The last snapshot of a guest in a store."""

    snapshot: str
    chunks: Sequence[bytes]
    regions: Mapping[str, Past]
    extra: Mapping[str, Any]
    """Other data, such as the ID of libvirt's checkpoint and the number of the last capture."""


def load(folder: Path) -> ParentState | None:
    """Load the parent state from a directory. Returns None if the state is missing or damaged."""
    try:
        own, _, told = (folder / "line.json").read_bytes().partition(b"\n")
        head = json.loads(told)
        if own.decode() != blake3.blake3(told).hexdigest() or head["version"] != VERSION:
            return None
        sums: dict[str, str] = head["sums"]
        if any(_sum(folder / name) != sum_ for name, sum_ in sums.items()):
            return None
        raw = (folder / "chunks").read_bytes()
        regions = {
            name: Past(
                map=np.load(folder / f"{number}.map.npy", mmap_mode="r", allow_pickle=False),
                prints=_prints(folder / f"{number}.prints") if printed else None,
            )
            for number, (name, printed) in enumerate(head["regions"])
        }
        return ParentState(
            snapshot=str(head["snapshot"]),
            chunks=Digests(raw),
            regions=regions,
            extra=head["extra"],
        )
    except (OSError, ValueError, TypeError, KeyError, EOFError):
        return None


def amend(folder: Path, extra: Mapping[str, Any]) -> None:
    """Update the capture methods' data in a parent state.

    `folder`: directory of the state; `extra`: the values to add or replace. Does not change a
    missing or damaged state. Raises OSError.
    """
    try:
        own, _, told = (folder / "line.json").read_bytes().partition(b"\n")
        if own.decode() != blake3.blake3(told).hexdigest():
            return
        head = json.loads(told)
        head["extra"] = {**head["extra"], **extra}
    except (OSError, ValueError, TypeError, KeyError):
        return
    new = folder / "line.json.new"
    new.write_bytes(_headed(head))
    new.chmod(0o600)
    new.replace(folder / "line.json")


def forget(folder: Path) -> None:
    """Delete the parent state, so that the next snapshot starts a new chain."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, *, now: float) -> None:
    """Remove stale entries from a directory of parent states.

    Stale entries are drafts of killed agents, and states that have not been used for `_UNUSED`
    seconds. `now` is in seconds since 1970. Raises OSError if the directory cannot be listed.
    """
    for one in folder.iterdir():
        with suppress(OSError):
            limit = _UNUSED if (one / "line.json").exists() else _DRAFTED
            if now - one.stat().st_mtime > limit:
                forget(one)


class Draft:
    """The parent state of a snapshot that is being created. Use it as a context manager.

    On exit the draft is discarded, unless `keep` was called.
    """

    def __init__(self, folder: Path) -> None:
        """Start a draft for `folder`, which need not exist. Raises OSError."""
        self._folder = folder
        self._new, self._lock = drafted(folder)
        self._regions: dict[str, int] = {}

    def __enter__(self) -> "Draft":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._new, ignore_errors=True)
        os.close(self._lock)

    def prints(self, name: str, kind: Kind, size: int) -> Prints:
        """Return an array for a region's prints. `size`: the region's size in bytes.

        The array is mapped from a file to save memory.
        """
        path = self._new / f"{self._number(name)}.prints"
        with path.open("wb") as file:
            file.truncate(units(kind, size) * PRINT)
        return np.memmap(path, dtype=f"V{PRINT}", mode="r+")

    def map(self, kind: Kind, size: int) -> Map:
        """Return an array for a region's map. `size`: the region's size in bytes.

        The array is mapped from an unnamed file. This allows the array's pages to be released: the
        map of a 64 GiB region takes 64 MiB.
        """
        count = units(kind, size)
        if not count:
            return nothing(kind, size)
        with tempfile.TemporaryFile(dir=self._new) as file:
            file.truncate(count * ZERO.itemsize)
            map_: Map = np.memmap(file, dtype=np.uint32, mode="r+", shape=(count,))
        map_.fill(ZERO)
        return map_

    def _number(self, name: str) -> int:
        return self._regions.setdefault(name, len(self._regions))

    def keep(
        self,
        snapshot: str,
        chunks: Sequence[bytes],
        maps: Mapping[str, Map],
        extra: Mapping[str, Any],
    ) -> None:
        """Replace the previous parent state with this draft. Raises OSError.

        `snapshot`: the new snapshot's ID; `chunks`: digests of its chunk table; `maps`: the map of
        each region; `extra`: data of the capture methods. If the process is killed during the
        replacement, the parent state is missing or damaged. Later snapshots then ignore it.
        """
        for name, map_ in maps.items():
            np.save(self._new / f"{self._number(name)}.map.npy", map_, allow_pickle=False)
        (self._new / "chunks").write_bytes(Digests.of(chunks).raw)
        files = sorted(self._new.iterdir())
        head = {
            "version": VERSION,
            "snapshot": snapshot,
            "regions": [
                [name, (self._new / f"{number}.prints").exists()]
                for name, number in sorted(self._regions.items(), key=lambda one: one[1])
            ],
            "extra": dict(extra),
            "sums": {file.name: _sum(file) for file in files},
        }
        (self._new / "line.json").write_bytes(_headed(head))
        for file in self._new.iterdir():
            with suppress(OSError):
                file.chmod(0o600)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._new.replace(self._folder)


def _headed(head: Mapping[str, Any]) -> bytes:
    told = json.dumps(head).encode()
    return blake3.blake3(told).hexdigest().encode() + b"\n" + told


def drafted(folder: Path) -> tuple[Path, int]:
    """Create a draft directory beside a parent state. Returns its path, and a locked descriptor.

    The directory's name never equals the name of a parent state. A free lock means that the process
    was killed; the creation of a later draft then removes the directory. Raises OSError.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    clear(folder.parent)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return new, lock


def clear(lines: Path) -> None:
    """Remove drafts of killed processes from a directory of parent states."""
    for one in lines.glob(".*"):
        with suppress(OSError):
            lock = os.open(one, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - one.stat().st_mtime > _NEW:
                    shutil.rmtree(one, ignore_errors=True)
            finally:
                os.close(lock)


def _prints(path: Path) -> Prints:
    return np.memmap(path, dtype=f"V{PRINT}", mode="r")


def _sum(path: Path) -> str:
    # The file is read, not mapped. Mapped pages would count as memory of this process: 256 MiB for
    # the prints of a guest with 64 GiB.
    told = blake3.blake3()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_PART):
            told.update(part)
    return told.hexdigest()
