"""From one store into another, without any key: boxes go as they are, and so does the manifest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vmckpt.errors import BadInput, NotInStore, StoreDamaged
from vmckpt.snapshot.keeping import Progress, silent, told, wrapped_of
from vmckpt.store import manifest, packs
from vmckpt.store.index import Entries, Flags, Names, NameSet, Numbers, Run
from vmckpt.store.store import Store
from vmckpt.units import Bytes

Box = tuple[bytes, memoryview, int]
"""A chunk's name, its box, and how long the chunk is."""
_PIECE = 4 << 20
"""Bytes that are read at once if the boxes that are wanted are side by side."""
_GAP = 64 << 10
"""Bytes between two boxes that are rather read than skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A snapshot that is in another place by now."""

    id: str
    name: str
    already: bool
    """It was there before."""
    chunks: int
    """That the snapshot has."""
    chunks_new: int
    """That were not there."""
    bytes_new: Bytes
    """Written for them."""
    encrypted: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "already_there": self.already,
            "chunks": self.chunks,
            "new_chunks": self.chunks_new,
            "new_bytes": self.bytes_new,
            "encrypted": self.encrypted,
        }


def copy(source: Store, target: Store, id_: str, progress: Progress = silent) -> Moved:
    """Copy a snapshot; what the target has of it is not written again.

    One that was broken off is begun anew, and finds what it had written. Raises StoreError.
    """
    if source.id == target.id:
        raise BadInput(
            f"{source.backend.where} and {target.backend.where} are the same store",
            mend="name another one with --to",
        )
    data = source.manifest(id_)
    found = manifest.decode(data, id_, None)
    wrapped = wrapped_of(source, found)
    names = found.names.array()
    if there_already(target, id_, data):
        return moved(found, already=True)
    with target.writer(None) as writer:
        missing = NameSet([names[~writer.have(names)]])
        done = 0
        for name, box, plain in boxes(source, missing):
            writer.add_box(name, bytes(box), plain)
            done += len(box)
            progress(told("copy", done))
        written = writer.finish()
        target.publish(id_, data, wrapped, writer=writer)
    return moved(found, new=written.chunks_new, written=written.bytes_new)


def moved(
    found: manifest.Manifest, *, already: bool = False, new: int = 0, written: int = 0
) -> Moved:
    """What became of a snapshot."""
    return Moved(
        id=found.public.id,
        name=found.public.name,
        already=already,
        chunks=len(found.names),
        chunks_new=new,
        bytes_new=Bytes(written),
        encrypted=found.encrypted,
    )


def there_already(store: Store, id_: str, data: bytes) -> bool:
    """Whether a store has this very snapshot. Raises BadInput if it is another one of that id."""
    try:
        there = store.manifest(id_)
    except NotInStore:
        return False
    if there != data:
        raise BadInput(
            f"{store.backend.where} has another snapshot {id_} already",
            mend="vmckpt snapshot verify tells which of them is whole",
        )
    return True


def boxes(store: Store, wanted: NameSet) -> Iterator[Box]:
    """The boxes of chunks, each once, in the order of their packs, compared with their hashes.

    Raises StoreDamaged if a chunk is in no pack that is whole.
    """
    done = np.zeros(len(wanted), dtype=bool)
    # A collection may put some into other packs while we are at it: then they are looked for again.
    for _ in range(2):
        if not done.all():
            for run in store.catalog.load().index.runs:
                yield from _of_run(store, run, wanted, done)
    lost: Names = wanted.names[~done]
    if len(lost):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise StoreDamaged(
            f"{store.backend.where}: chunk {lost[0].tobytes().hex()[:16]}{more}: in none of its"
            " packs that is whole",
            mend="vmckpt snapshot verify tells which snapshots need it",
        )


def _of_run(store: Store, run: Run, wanted: NameSet, done: Flags) -> Iterator[Box]:
    usable = {info.id for info in run.usable}
    good = np.array([info.id in usable for info in run.packs], dtype=bool)
    at = wanted.positions(run.entries["name"])
    ours = np.flatnonzero(at >= 0)
    ours = ours[good[run.entries["pack"][ours]]]
    ours = ours[np.lexsort((run.entries["offset"][ours], run.entries["pack"][ours]))]
    piece: list[int] = []
    for one in map(int, ours):
        if done[at[one]]:
            continue
        if piece and not _beside(run.entries, piece, one):
            yield from _read(store, run, piece, at, done)
            piece = []
        piece.append(one)
    if piece:
        yield from _read(store, run, piece, at, done)


def _beside(entries: Entries, piece: list[int], one: int) -> bool:
    """Whether a box can be read at once with those before it."""
    first, last, new = entries[piece[0]], entries[piece[-1]], entries[one]
    gap = int(new["offset"]) - int(last["offset"]) - int(last["length"])
    size = int(new["offset"]) + int(new["length"]) - int(first["offset"])
    return bool(new["pack"] == first["pack"]) and gap <= _GAP and size <= _PIECE


def _read(
    store: Store, run: Run, piece: list[int], at: Numbers, done: Flags
) -> Iterator[Box]:  # fmt: skip
    rows = [run.entries[one] for one in piece]
    start = int(rows[0]["offset"])
    end = int(rows[-1]["offset"]) + int(rows[-1]["length"])
    key = packs.key_of(run.packs[rows[0]["pack"]].id)
    try:
        data = memoryview(store.backend.get(key, start, end - start))
    except NotInStore:
        return
    for one, row in zip(piece, rows, strict=True):
        first = int(row["offset"]) - start
        box = data[first : first + int(row["length"])]
        # One that is damaged may be whole in another pack.
        if not done[at[one]] and packs.box_hash(box) == row["hash"].tobytes():
            done[at[one]] = True
            yield row["name"].tobytes(), box, int(row["plain"])
