"""An index from chunks to packs: a few sorted arrays, which are searched in turn.

A *run* is an array of rows, sorted by the first eight bytes of the chunk name. A writer's new packs
become small runs in memory, which are merged as their number grows. Each file of the client's cache
is one run, which is memory-mapped. Names are always compared in full, because collisions of the
first eight bytes can be forged.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmckpt.store.format.pack import HASH, NAME, Rows

ENTRY = np.dtype(
    [
        ("name", f"V{NAME}"), ("pack", "<u4"), ("offset", "<u4"), ("length", "<u4"),
        ("plain", "<u4"), ("hash", f"V{HASH}"),
    ]
)  # fmt: skip
_BLOCK = 1 << 14
_LARGE = 1 << 16
Entries = NDArray[Any]
Names = NDArray[np.void]
Keys = NDArray[np.uint64]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackInfo:
    """A pack whose chunks are listed in a run, a sorted part of the index."""

    id: str
    generation: int
    size: int
    """Size of the pack's object in bytes."""
    foreign: bool = False
    """Whether this is a foreign pack; see `format.pack`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sealed chunk is stored."""

    pack: str
    offset: int
    length: int
    plain: int
    hash: bytes


def names_of(names: Iterable[bytes] | Names) -> Names:
    """Convert names to an array."""
    if isinstance(names, np.ndarray):
        return names
    return np.frombuffer(b"".join(names), dtype=f"V{NAME}")


def keys_of(names: Names) -> Keys:
    """Return the first eight bytes of each name, as a number."""
    halves = np.ascontiguousarray(names).view(np.uint64).reshape(len(names), NAME // 8)
    return np.ascontiguousarray(halves[:, 0])


def positions(keys: Keys, names: Names, asked: Names) -> Numbers:
    """Return the position of each name of `asked` in a sorted array; -1 for a missing name.

    `keys` is the result of `keys_of(names)`, and `names` is sorted by key. If a name occurs several
    times, its first position is returned.
    """
    wanted = keys_of(asked)
    at = np.searchsorted(keys, wanted).astype(np.int64)
    found = np.full(len(asked), -1, dtype=np.int64)
    left = np.arange(len(asked))
    while len(left):
        left = left[at[left] < len(keys)]
        left = left[keys[at[left]] == wanted[left]]
        same = np.asarray(names[at[left]] == asked[left], dtype=bool)
        found[left[same]] = at[left[same]]
        left = left[~same]
        at[left] += 1
    return found


class NameSet:
    """A sorted set of chunk names."""

    def __init__(self, parts: Iterable[Names]) -> None:
        keys, names = _sorted(np.zeros(0, dtype=f"V{NAME}"))
        for part in _gathered(parts):
            # Parts are added one by one, because their total may be much larger than the result.
            new = part[positions(keys, names, part) < 0]
            keys, names = _sorted(np.concatenate((names, new)))
        self.names = names[positions(keys, names, names) == np.arange(len(names))]
        self._keys = keys_of(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def positions(self, asked: Names) -> Numbers:
        """Return the position of each name of `asked` in the set; -1 for a missing name."""
        return positions(self._keys, self.names, asked)


class Run:
    """The sorted rows of several packs."""

    def __init__(self, packs: Sequence[PackInfo], keys: Keys, entries: Entries) -> None:
        self.packs, self.keys, self.entries = tuple(packs), keys, entries
        self._usable = np.ones(len(packs), dtype=bool)

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, packs: Sequence[tuple[PackInfo, Rows]]) -> "Run":
        """Build a run from the index rows of packs."""
        entries = np.empty(sum(len(rows) for _, rows in packs), dtype=ENTRY)
        at = 0
        for number, (_, rows) in enumerate(packs):
            part = entries[at : at + len(rows)]
            for field in ("name", "offset", "length", "plain", "hash"):
                part[field] = rows[field]
            part["pack"] = number
            at += len(rows)
        return cls._of([info for info, _ in packs], entries)

    @classmethod
    def merged(cls, runs: Sequence["Run"]) -> "Run":
        """Return several runs, merged into a new run, without the packs that are not usable."""
        packs: list[PackInfo] = []
        rows, keys, numbers = [], [], []
        for run in runs:
            rows.append(np.flatnonzero(run._usable[run.entries["pack"]]))
            keys.append(run.keys[rows[-1]])
            numbers.append(np.cumsum(run._usable) - 1 + len(packs))
            packs += run.usable
        joined = np.concatenate([np.zeros(0, dtype=np.uint64), *keys])
        order = np.argsort(joined, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        # Rows are copied in blocks to save memory: they make up most of an index, and two copies
        # are in memory already.
        entries, at = np.empty(len(order), dtype=ENTRY), 0
        for run, these, number in zip(runs, rows, numbers, strict=True):
            for start in range(0, len(these), _BLOCK):
                part = run.entries[these[start : start + _BLOCK]]
                part["pack"] = number[part["pack"]]
                entries[place[at : at + len(part)]] = part
                at += len(part)
        return cls(packs, joined[order], entries)

    @classmethod
    def _of(cls, packs: Sequence[PackInfo], entries: Entries) -> "Run":
        keys = keys_of(entries["name"])
        order = np.argsort(keys, kind="stable")
        return cls(packs, keys[order], entries[order])

    def use_only(self, packs: "frozenset[str] | set[str]") -> None:
        """Ignore all packs except the given ones."""
        self._usable = np.array([one.id in packs for one in self.packs], dtype=bool)

    def view(self) -> "Run":
        """Return a run that shares this run's rows but has an independent set of usable packs."""
        run = Run(self.packs, self.keys, self.entries)
        run._usable = self._usable.copy()
        return run

    @property
    def usable(self) -> list[PackInfo]:
        """The packs that are searched."""
        return [info for info, good in zip(self.packs, self._usable, strict=True) if good]

    def places(self, name: bytes) -> list[Place]:
        """Return all places where a chunk is stored.

        There are several places, for example, if two writers stored the chunk at the same time.
        """
        key = np.frombuffer(name, dtype=np.uint64, count=1)[0]
        at = int(np.searchsorted(self.keys, key))
        found = []
        while at < len(self.keys) and self.keys[at] == key:
            entry = self.entries[at]
            if entry["name"].tobytes() == name and self._usable[entry["pack"]]:
                found.append(
                    Place(
                        self.packs[entry["pack"]].id, int(entry["offset"]), int(entry["length"]),
                        int(entry["plain"]), entry["hash"].tobytes(),
                    )
                )  # fmt: skip
            at += 1
        return found

    def has(self, asked: Names) -> Flags:
        """Return, for each name, whether a usable pack contains the chunk."""
        at = positions(self.keys, self.entries["name"], asked)
        there = at >= 0
        there[there] = self._usable[self.entries["pack"][at[there]]]
        if not self._usable.all():
            # A chunk's first place may be in an unusable pack, and another place in a usable pack.
            for number in np.flatnonzero((at >= 0) & ~there):
                there[number] = bool(self.places(asked[number].tobytes()))
        return there


class Index:
    """The index of a store's chunks, made up of several runs."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.runs = list(runs)

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def add(self, info: PackInfo, rows: Rows) -> None:
        """Add a new pack. `rows`: its index."""
        self.runs.append(Run.of([(info, rows)]))
        # Each run has at least twice as many rows as the next run. This keeps both the number of
        # runs and the number of merges small. Large runs are not merged, because a merge takes
        # twice their memory.
        while len(self.runs) > 1 and len(self.runs[-2]) < min(_LARGE, 2 * len(self.runs[-1])):
            last = self.runs.pop()
            self.runs[-1] = Run.merged([self.runs[-1], last])

    def places(self, name: bytes) -> list[Place]:
        """Return all places where a chunk is stored."""
        return [place for run in self.runs for place in run.places(name)]

    def has(self, names: Names) -> Flags:
        """Return, for each name, whether the index contains the chunk."""
        there = np.zeros(len(names), dtype=bool)
        for run in self.runs:
            left = np.flatnonzero(~there)
            there[left] = run.has(names[left])
        return there

    def only(self, *, foreign: bool) -> "Index":
        """Return an index of only the foreign packs, or of only the store's own packs."""
        views = [run.view() for run in self.runs]
        for view in views:
            view.use_only({info.id for info in view.usable if info.foreign is foreign})
        return Index(views)

    def packs(self) -> dict[str, PackInfo]:
        """Return the packs that are searched, by ID."""
        return {info.id: info for run in self.runs for info in run.usable}


def _sorted(names: Names) -> tuple[Keys, Names]:
    keys = keys_of(names)
    order = np.argsort(keys, kind="stable")
    return keys[order], names[order]


def _gathered(parts: Iterable[Names]) -> Iterator[Names]:
    """Yield the names in larger and larger parts, to avoid sorting many small parts."""
    waiting: list[Names] = []
    size, enough = 0, 1 << 16
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= enough:
            yield np.concatenate(waiting)
            waiting, size, enough = [], 0, min(2 * enough, 1 << 22)
    if waiting:
        yield np.concatenate(waiting)
