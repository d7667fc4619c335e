"""The packs of a store and their indexes, which are read once and cached on the client.

The client's cache is a directory with one file per run (see `chunk_index`). Each file ends with the
BLAKE3 of its content. A damaged file is deleted, and the indexes of its packs are read from the
store again.
"""

import contextlib
import secrets
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.store.backend.base import Backend, Stored
from vmckpt.store.chunk_index import ENTRY, Index, PackInfo, Run
from vmckpt.store.format import pack as format_pack

_MAGIC = b"vmckptIX1"
_HEAD = struct.Struct("<9sxxxxxxxQQ")
_PACK = struct.Struct("<32sQII")
_SUM = 32
_TAIL = 64 << 10
"""Number of bytes in the first read from the end of a pack: enough for the index and footer of
about a thousand chunks."""
_PART = 4 << 20
_MOST_FILES = 8
_AT_ONCE = 1000
"""Number of packs whose indexes are collected in memory and then made into a run."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A store's packs at one instant."""

    index: Index
    stored: Mapping[str, Stored]
    """The listed packs, by ID. Excludes the packs in the argument `without` of `Catalog.load`."""
    unreadable: Mapping[str, StoreError]
    """The error of each pack whose index cannot be used, by ID. These packs are not removed."""


class Catalog:
    """A store's packs, as far as this client knows them."""

    def __init__(self, backend: Backend, cache: Path | None) -> None:
        """`cache`: a directory only for this store; None: keep the indexes in memory."""
        self._backend, self._cache = backend, cache
        self._kept: list[Run] = []
        self._guard = threading.Lock()

    def load(self, without: "frozenset[str]" = frozenset()) -> Listing:
        """List all packs of the store except `without`, and load their indexes.

        Raises StoreError.
        """
        stored = {}
        for one in self._backend.keys("packs/"):
            pack = format_pack.pack_of(one.key)
            if pack is not None and pack not in without:
                stored[pack] = one
        runs = self._kept if self._cache is None else list(self._cached())
        known = {info.id for run in runs for info in run.packs}
        fresh, unreadable = self._fetched(
            [one for pack, one in stored.items() if pack not in known]
        )
        runs = self._kept_for_later(runs, fresh, set(stored))
        with self._guard:
            _use_once(runs, set(stored))
            index = Index(run.view() for run in runs)
        return Listing(index, stored, unreadable)

    def _fetched(self, missing: Sequence[Stored]) -> tuple[list[Run], dict[str, StoreError]]:
        """Read pack indexes from the store. Returns runs, and the errors of unreadable packs."""
        runs, unreadable, part = [], {}, []
        with ThreadPoolExecutor(8, "index") as pool:
            for one, found in zip(missing, pool.map(self._read, missing), strict=True):
                if isinstance(found, format_pack.Index):
                    pack = one.key.rpartition("/")[2]
                    info = PackInfo(pack, found.generation, one.size, found.foreign)
                    part.append((info, found.rows))
                elif found is not None:
                    unreadable[one.key.rpartition("/")[2]] = found
                if len(part) == _AT_ONCE:
                    runs.append(Run.of(part))
                    part = []
        return [*runs, Run.of(part)] if part else runs, unreadable

    def _read(self, one: Stored) -> "format_pack.Index | StoreError | None":
        """Return a pack's index, the error if it is invalid, or None if the pack is gone."""
        try:
            return read_index(self._backend, one)
        except NotInStore:
            return None
        except (StoreDamaged, StoreNewer) as exc:
            return exc

    def _kept_for_later(self, runs: list[Run], fresh: list[Run], there: set[str]) -> list[Run]:
        """Add new runs to the cache.

        Merges all runs if there are too many, or if most packs of a run no longer exist. `there`
        contains the IDs of the packs in the store. Returns all runs.
        """
        if self._cache is None:
            self._kept = [*runs, *fresh]
            if len(self._kept) > _MOST_FILES:
                _use_once(self._kept, there)
                self._kept = [Run.merged(self._kept)]
            return self._kept
        runs = [*runs, *fresh]
        if len(runs) > _MOST_FILES or any(_wasteful(run, there) for run in runs):
            _use_once(runs, there)
            runs = fresh = [Run.merged(runs)]
            outdated = list(self._cache.glob("*.index"))
        else:
            outdated = []
        # If the cache cannot be written, the only loss is time.
        with contextlib.suppress(OSError):
            for run in fresh:
                _save(self._cache, run)
            for path in outdated:
                path.unlink(missing_ok=True)
        return runs

    def _cached(self) -> Iterable[Run]:
        if self._cache is None or not self._cache.is_dir():
            return
        for path in sorted(self._cache.glob("*.index")):
            run = _loaded(path)
            if run is not None:
                yield run
            else:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def read_index(backend: Backend, one: Stored) -> format_pack.Index:
    """Read the index of a pack.

    Raises StoreDamaged, StoreNewer, NotInStore, StoreError. Each error names the pack.
    """
    try:
        if one.size < format_pack.HEADER + format_pack.FOOTER:
            raise StoreDamaged("the pack is too short")
        start = max(0, one.size - _TAIL)
        data = backend.get(one.key, start, one.size - start)
        length = format_pack.tail_length(data[-format_pack.FOOTER :])
        if length > len(data):
            start = max(0, one.size - length)
            data = backend.get(one.key, start, one.size - start)
        return format_pack.parse_tail(data, one.size)
    except (StoreDamaged, StoreNewer) as exc:
        raise type(exc)(
            f"{backend.where}: {one.key}: {exc.message}",
            hint="run vmckpt snapshot verify for details",
        ) from exc


def _use_once(runs: Iterable[Run], there: set[str]) -> None:
    """Use each pack in only one run.

    Two clients that share a cache may both have added the same pack.
    """
    unseen = set(there)
    for run in runs:
        run.use_only(unseen)
        unseen -= {info.id for info in run.usable}


def _wasteful(run: Run, there: set[str]) -> bool:
    """Return whether more than half of a run's packs no longer exist."""
    return 2 * sum(info.id not in there for info in run.packs) > len(run.packs)


def _sum(path: Path, end: int) -> bytes:
    # The file is read, not mapped: mapped pages would count as memory of this process.
    told = blake3()
    with path.open("rb", buffering=0) as file:
        while end > 0 and (part := file.read(min(_PART, end))):
            told.update(part)
            end -= len(part)
    return told.digest()


def _save(folder: Path, run: Run) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = secrets.token_hex(8)
    temporary = folder / f"{name}.part"
    table = b"".join(
        _PACK.pack(bytes.fromhex(info.id), info.size, info.generation, info.foreign)
        for info in run.packs
    )
    parts = (_HEAD.pack(_MAGIC, len(run.packs), len(run)), table,
             run.keys.data.cast("B"), run.entries.view(np.uint8).data)  # fmt: skip
    try:
        digest = blake3()
        with temporary.open("xb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
        temporary.rename(folder / f"{name}.index")
    finally:
        temporary.unlink(missing_ok=True)


def _loaded(path: Path) -> Run | None:
    """Load a run from a file. Returns None if the file is damaged or cannot be read."""
    try:
        if path.stat().st_size < _HEAD.size + _SUM:
            return None
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError):
        return None
    magic, pack_count, count = _HEAD.unpack(data[: _HEAD.size].tobytes())
    keys = _HEAD.size + pack_count * _PACK.size
    entries = keys + 8 * count
    end = entries + ENTRY.itemsize * count
    if magic != _MAGIC or end + _SUM != len(data):
        return None
    if _sum(path, end) != data[end:].tobytes():
        return None
    infos = [
        PackInfo(pack.hex(), generation, size, bool(foreign))
        for pack, size, generation, foreign in _PACK.iter_unpack(data[_HEAD.size : keys].tobytes())
    ]
    # Both arrays are mapped. Keys are read often and in random order, so all keys, eight bytes for
    # each chunk, may stay in memory.
    sorted_keys = np.frombuffer(data, dtype=np.uint64, count=count, offset=keys)
    return Run(infos, sorted_keys, np.frombuffer(data, dtype=ENTRY, count=count, offset=entries))
