"""Copy snapshots between stores without any key: sealed chunks and manifest stay unchanged."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from vmckpt.errors import BadInput, NotInStore, StoreDamaged
from vmckpt.snapshot.catalog import Progress, copied_so_far, silent, wrapped_of
from vmckpt.store.chunk_index import Entries, Flags, Index, Names, NameSet, Numbers, Run
from vmckpt.store.format import manifest, pack
from vmckpt.store.format.manifest import Manifest
from vmckpt.store.receive import Present
from vmckpt.store.repository import Store
from vmckpt.units import Bytes

Box = tuple[bytes, memoryview, int]
"""A chunk's name, the sealed chunk, and the chunk's length."""
_PIECE = 4 << 20
"""Maximum number of bytes that are read at once if the wanted sealed chunks are adjacent."""
_GAP = 64 << 10
"""Largest gap, in bytes, between two sealed chunks that are read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The result of copying, exporting or importing a snapshot."""

    id: str
    name: str
    already: bool
    """Whether the target already had the snapshot."""
    chunks: int
    """Number of chunks of the snapshot."""
    chunks_new: int
    """Number of chunks that the target lacked."""
    bytes_new: Bytes
    """Bytes written for these chunks."""
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
    """Copy a snapshot to another store. Chunks that the target already has are not written again.

    An interrupted copy can be repeated and reuses the chunks already written. If the target already
    has the snapshot, chunks that it has lost are restored. Raises BadInput if source and target are
    the same store or the target has a different snapshot with the same ID, and StoreError.
    """
    if source.id == target.id:
        raise BadInput(
            f"{source.backend.where} and {target.backend.where} are the same store",
            hint="give another store with --to",
        )
    data = source.manifest(id_)
    found = manifest.decode(data, id_, None)
    wrapped = wrapped_of(source, found)
    names = found.names.array()
    there = there_already(target, found, data)
    if there is There.WHOLE:
        present = Present.of(target.catalog.load().index)
        lacking = boxes(source, NameSet([present.missing(names)]), present.same, read=False)
        if next(lacking, None) is None:
            return moved(found, already=True)
    with target.receiver(encrypted=found.encrypted) as receiver:
        present = receiver.present
        done = 0
        for name, box, plain in boxes(source, NameSet([present.missing(names)]), present.same):
            receiver.add(name, box, plain)
            done += len(box)
            progress(copied_so_far("copy", done))
        written = receiver.finish()
        make_place(target, id_, there)
        target.publish(id_, data, wrapped, writer=receiver)
    return moved(
        found, already=there is There.WHOLE, new=written.chunks_new, written=written.bytes_new
    )


def moved(found: Manifest, *, already: bool = False, new: int = 0, written: int = 0) -> Moved:
    """Return the result for the snapshot with the manifest `found`; see Moved for the arguments."""
    return Moved(
        id=found.public.id,
        name=found.public.name,
        already=already,
        chunks=len(found.names),
        chunks_new=new,
        bytes_new=Bytes(written),
        encrypted=found.encrypted,
    )


class There(StrEnum):
    """The state of a snapshot's manifest and wrapped keys in a store."""

    NOTHING = "nothing"
    DAMAGED = "damaged"
    """The manifest or the wrapped keys cannot be read."""
    WHOLE = "whole"


def there_already(store: Store, found: Manifest, data: bytes) -> There:
    """Return the state of a snapshot in a store. `data` is the snapshot's encoded manifest.

    Raises BadInput if the store has a different snapshot with the same ID, and StoreError.
    """
    id_ = found.public.id
    try:
        there = store.manifest(id_)
    except NotInStore:
        return There.NOTHING
    try:
        manifest.decode(there, id_, None)
        if there == data:
            wrapped_of(store, found)
            return There.WHOLE
    except StoreDamaged:
        return There.DAMAGED
    raise BadInput(
        f"{store.backend.where} already has a different snapshot {id_}",
        hint="run vmckpt snapshot verify in both stores to see which one is intact",
    )


def make_place(store: Store, id_: str, there: There) -> None:
    """Delete a damaged manifest, so that an intact one can be published. Raises StoreError.

    `there`: the result of `there_already`; if the manifest is not damaged, nothing is deleted.
    """
    if there is There.DAMAGED:
        store.backend.delete(f"snapshots/{id_}")


def boxes(
    store: Store, wanted: NameSet, known: Callable[[bytes, bytes], bool] | None = None, *,
    read: bool = True,
) -> Iterator[Box]:  # fmt: skip
    """Yield sealed chunks, in the order of their packs, after checking their hashes.

    Each chunk is yielded once, from one of the store's own packs. If a chunk is only in foreign
    packs, all its different sealed forms are yielded. `known` returns, for the name and hash of a
    sealed chunk, whether to skip it. Without `read`, the sealed chunks are empty and not checked.
    Raises StoreDamaged if a chunk has no intact sealed form, and StoreError.
    """
    done = np.zeros(len(wanted), dtype=bool)
    # A garbage collection may move chunks to other packs meanwhile, so there is a second search for
    # missing chunks.
    for _ in range(2):
        if not done.all():
            index = store.catalog.load().index
            yield from _of_index(_Sought(store, wanted, done, done, known, read=read), index)
            rest = _Sought(store, wanted, done, done.copy(), known, foreign=True, read=read)
            yield from _of_index(rest, index)
    lost: Names = wanted.names[~done]
    if len(lost):
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise StoreDamaged(
            f"{store.backend.where}: no intact pack has chunk {lost[0].tobytes().hex()[:16]}{more}",
            hint="run vmckpt snapshot verify to see which snapshots are affected",
        )


@dataclass(slots=True)
class _Sought:
    """The state of a search for sealed chunks in own or foreign packs."""

    store: Store
    wanted: NameSet
    done: Flags
    """Chunks that were found."""
    enough: Flags
    """Chunks that need no further search: the same array as `done` if one sealed form is enough."""
    known: Callable[[bytes, bytes], bool] | None
    foreign: bool = False
    read: bool = True
    seen: set[tuple[int, bytes]] = field(default_factory=set)
    """Sealed chunks found in foreign packs: index in `wanted`, and hash."""

    def over(self, at: int, name: bytes, told: bytes) -> bool:
        """Return whether to skip a sealed chunk. `at`: its index in `wanted`; `told`: its hash."""
        if self.enough[at] or (self.foreign and (at, told) in self.seen):
            return True
        if self.known is not None and self.known(name, told):
            self.found(at, told)
            return True
        return False

    def found(self, at: int, told: bytes) -> None:
        """Record that a chunk was found intact. `at`: its index in `wanted`; `told`: its hash."""
        self.done[at] = True
        if self.foreign:
            self.seen.add((at, told))


def _of_index(sought: _Sought, index: Index) -> Iterator[Box]:
    for run in index.only(foreign=sought.foreign).runs:
        yield from _of_run(sought, run)


def _of_run(sought: _Sought, run: Run) -> Iterator[Box]:
    usable = {info.id for info in run.usable}
    good = np.array([info.id in usable for info in run.packs], dtype=bool)
    at = sought.wanted.positions(run.entries["name"])
    ours = np.flatnonzero(at >= 0)
    ours = ours[good[run.entries["pack"][ours]]]
    ours = ours[np.lexsort((run.entries["offset"][ours], run.entries["pack"][ours]))]
    piece: list[int] = []
    for one in map(int, ours):
        row = run.entries[one]
        name, told = row["name"].tobytes(), row["hash"].tobytes()
        if sought.over(int(at[one]), name, told):
            continue
        if not sought.read:
            sought.found(int(at[one]), told)
            yield name, memoryview(b""), int(row["plain"])
            continue
        if piece and not _beside(run.entries, piece, one):
            yield from _read(sought, run, piece, at)
            piece = []
        piece.append(one)
    if piece:
        yield from _read(sought, run, piece, at)


def _beside(entries: Entries, piece: list[int], one: int) -> bool:
    """Return whether a sealed chunk can be read in one piece with those before it."""
    first, last, new = entries[piece[0]], entries[piece[-1]], entries[one]
    gap = int(new["offset"]) - int(last["offset"]) - int(last["length"])
    size = int(new["offset"]) + int(new["length"]) - int(first["offset"])
    return bool(new["pack"] == first["pack"]) and gap <= _GAP and size <= _PIECE


def _read(sought: _Sought, run: Run, piece: list[int], at: Numbers) -> Iterator[Box]:
    rows = [run.entries[one] for one in piece]
    start = int(rows[0]["offset"])
    end = int(rows[-1]["offset"]) + int(rows[-1]["length"])
    key = pack.key_of(run.packs[rows[0]["pack"]].id)
    try:
        data = memoryview(sought.store.backend.get(key, start, end - start))
    except NotInStore:
        return
    for one, row in zip(piece, rows, strict=True):
        first = int(row["offset"]) - start
        box = data[first : first + int(row["length"])]
        name, told = row["name"].tobytes(), row["hash"].tobytes()
        # A damaged sealed chunk is skipped: another pack may have an intact copy.
        if not sought.over(int(at[one]), name, told) and pack.box_hash(box) == told:
            sought.found(int(at[one]), told)
            yield name, box, int(row["plain"])
