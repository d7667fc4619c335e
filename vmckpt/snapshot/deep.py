"""Reads every chunk of a snapshot and sees whether it fits its place."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import StoreDamaged
from vmckpt.snapshot.keeping import Progress, told
from vmckpt.store.chunk_index import Names, NameSet
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format.chunk_map import UNIT, ZERO, Digests, slots_of
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.repository import Store

Lengths = NDArray[np.uint32]
"""Of chunks; 0: it could not be read, or was not read yet."""
_BLOCK = 1 << 20
_AHEAD = 64
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Read:
    """What reading all of a snapshot gave."""

    chunks: int
    """That are whole."""
    wrong: tuple[str, ...]


class Known:
    """Chunks of one domain that were read and are whole: each is read once for all snapshots."""

    def __init__(self) -> None:
        self._names = NameSet(())
        self._lengths: Lengths = np.zeros(0, dtype=np.uint32)

    def lengths(self, digests: Names) -> Lengths:
        """How long each one is; 0 if that is not known."""
        at = self._names.positions(digests)
        found = np.zeros(len(digests), dtype=np.uint32)
        found[at >= 0] = self._lengths[at[at >= 0]]
        return found

    def add(self, digests: Names, lengths: Lengths) -> None:
        """Take in what was read now."""
        good = lengths > 0
        names = NameSet([self._names.names, digests[good]])
        merged = np.zeros(len(names), dtype=np.uint32)
        merged[names.positions(self._names.names)] = self._lengths
        merged[names.positions(digests[good])] = lengths[good]
        self._names, self._lengths = names, merged


def read(
    store: Store, private: Private, sealing: Sealing, known: Known, progress: Progress
) -> Read:  # fmt: skip
    """Read what is not known yet, and compare all with the maps. Raises StoreError."""
    chunks = private.chunks
    digests = Digests.of(chunks).array()
    lengths = known.lengths(digests)
    bad: dict[int, str] = {}
    done = 0
    with store.reader(sealing) as reader:
        for index in _ahead(reader, chunks, np.flatnonzero(lengths == 0).tolist()):
            try:
                lengths[index] = len(reader.read(chunks[index]))
            except StoreDamaged:
                bad[index] = sealing.name_of(chunks[index]).hex()[:16]
                continue
            done += int(lengths[index])
            progress(told("chunks", done))
    known.add(digests, lengths)
    wrong = [_unreadable(bad, len(chunks))] if bad else []
    wrong += misfits(private, lengths)
    return Read(len(chunks) - len(bad), tuple(wrong))


def misfits(private: Private, lengths: Lengths) -> Iterator[str]:
    """Where maps and chunks do not go together. Pure. What could not be read is left out."""
    for region in private.regions:
        count = _too_short(region, lengths)
        if count:
            yield f"{count} units of {region.name} are not in the chunks that its map names"
    for part in private.facts.stream:
        sizes = lengths[np.array(part.chunks, dtype=np.int64)]
        if sizes.all() and int(sizes.sum(dtype=np.int64)) != part.size:
            yield f"part {part.name} of its stream is not as long as its chunks"


def _too_short(region: RegionMap, lengths: Lengths) -> int:
    """Units that lie behind the end of their chunk, or in one of another make."""
    unit, count = UNIT[region.kind], 0
    for start in range(0, len(region.map), _BLOCK):
        part = region.map[start : start + _BLOCK]
        index, slot = slots_of(part[part != ZERO])
        size = lengths[index].astype(np.int64)
        ends = (slot.astype(np.int64) + 1) * unit
        count += int(((size > 0) & ((ends > size) | (size % unit != 0))).sum())
    return count


def _ahead(reader: Reader, chunks: Sequence[bytes], wanted: list[int]) -> Iterator[int]:
    """The same, with those that come next being fetched."""
    reader.expect([chunks[one] for one in wanted[:_AHEAD]])
    for at in range(0, len(wanted), _AHEAD):
        coming = wanted[at + _AHEAD : at + 2 * _AHEAD]
        reader.expect([chunks[one] for one in coming])
        yield from wanted[at : at + _AHEAD]


def _unreadable(bad: "dict[int, str]", count: int) -> str:
    names = sorted(set(bad.values()))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{len(names)} of its {count} chunks cannot be read whole:"
        f" {', '.join(names[:_MOST_NAMED])}{more}"
    )
