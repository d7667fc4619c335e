"""Which pack holds a chunk: sorted arrays, a few of them, searched one after the other.

A *run* is an array of rows sorted by the first eight bytes of the name. What a writer adds makes
small runs in memory, merged as they grow; what comes from the client's cache is one run per file,
mapped and not read. A name is always compared whole: eight bytes alone can be made to collide.
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
    """A pack of a run."""

    id: str
    generation: int
    size: int
    """Of the whole object."""
    foreign: bool = False
    """See `format.pack`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a box is."""

    pack: str
    offset: int
    length: int
    plain: int
    hash: bytes


def names_of(names: Iterable[bytes] | Names) -> Names:
    """Names as an array."""
    if isinstance(names, np.ndarray):
        return names
    return np.frombuffer(b"".join(names), dtype=f"V{NAME}")


def keys_of(names: Names) -> Keys:
    """The first eight bytes of each name, as a number."""
    halves = np.ascontiguousarray(names).view(np.uint64).reshape(len(names), NAME // 8)
    return np.ascontiguousarray(halves[:, 0])


def positions(keys: Keys, names: Names, asked: Names) -> Numbers:
    """Where each name that is asked for is in a sorted array; -1 if it is not.

    Of several equal ones it is the first.
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
    """Names, each once."""

    def __init__(self, parts: Iterable[Names]) -> None:
        keys, names = _sorted(np.zeros(0, dtype=f"V{NAME}"))
        for part in _gathered(parts):
            # Not all at once: together they may be far more than what is in the end.
            new = part[positions(keys, names, part) < 0]
            keys, names = _sorted(np.concatenate((names, new)))
        self.names = names[positions(keys, names, names) == np.arange(len(names))]
        self._keys = keys_of(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def positions(self, asked: Names) -> Numbers:
        """The number of each name that is asked for; -1 if it is not here."""
        return positions(self._keys, self.names, asked)


class Run:
    """Rows of some packs, sorted."""

    def __init__(self, packs: Sequence[PackInfo], keys: Keys, entries: Entries) -> None:
        self.packs, self.keys, self.entries = tuple(packs), keys, entries
        self._usable = np.ones(len(packs), dtype=bool)

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, packs: Sequence[tuple[PackInfo, Rows]]) -> "Run":
        """A run from packs' own rows."""
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
        """One run of several, without what is not usable."""
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
        # A part at a time: rows are the most of an index, and these are there twice already.
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
        """Do as if the others were not there."""
        self._usable = np.array([one.id in packs for one in self.packs], dtype=bool)

    def view(self) -> "Run":
        """The same rows, with a choice of packs of its own."""
        run = Run(self.packs, self.keys, self.entries)
        run._usable = self._usable.copy()
        return run

    @property
    def usable(self) -> list[PackInfo]:
        """The packs that are searched."""
        return [info for info, good in zip(self.packs, self._usable, strict=True) if good]

    def places(self, name: bytes) -> list[Place]:
        """Where a chunk is: more than one place if two writers stored it at once."""
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
        """Which of the names are in a usable pack."""
        at = positions(self.keys, self.entries["name"], asked)
        there = at >= 0
        there[there] = self._usable[self.entries["pack"][at[there]]]
        if not self._usable.all():
            # The first place may be in a pack that is not usable, and another one not.
            for number in np.flatnonzero((at >= 0) & ~there):
                there[number] = bool(self.places(asked[number].tobytes()))
        return there


class Index:
    """All packs that count."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.runs = list(runs)

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def add(self, info: PackInfo, rows: Rows) -> None:
        """Take in a new pack."""
        self.runs.append(Run.of([(info, rows)]))
        # Each run in memory at least twice the next: a name is searched in few, and merged seldom.
        # Large ones stay as they are: both are in memory twice while they are merged.
        while len(self.runs) > 1 and len(self.runs[-2]) < min(_LARGE, 2 * len(self.runs[-1])):
            last = self.runs.pop()
            self.runs[-1] = Run.merged([self.runs[-1], last])

    def places(self, name: bytes) -> list[Place]:
        """Where a chunk is."""
        return [place for run in self.runs for place in run.places(name)]

    def has(self, names: Names) -> Flags:
        """Which of the names are there."""
        there = np.zeros(len(names), dtype=bool)
        for run in self.runs:
            left = np.flatnonzero(~there)
            there[left] = run.has(names[left])
        return there

    def only(self, *, foreign: bool) -> "Index":
        """The packs that came from other stores, or those that did not."""
        views = [run.view() for run in self.runs]
        for view in views:
            view.use_only({info.id for info in view.usable if info.foreign is foreign})
        return Index(views)

    def packs(self) -> dict[str, PackInfo]:
        """The packs that are searched, by id."""
        return {info.id: info for run in self.runs for info in run.usable}


def _sorted(names: Names) -> tuple[Keys, Names]:
    keys = keys_of(names)
    order = np.argsort(keys, kind="stable")
    return keys[order], names[order]


def _gathered(parts: Iterable[Names]) -> Iterator[Names]:
    """The same names in larger and larger parts, so that many small ones are not sorted often."""
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
