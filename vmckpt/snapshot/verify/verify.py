"""Verify snapshots: their objects bit by bit, their signatures and, with a key, every chunk.

Each flaw is reported once, with the object and the snapshots that need the object. If snapshots are
named, only the objects that they need are read.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vmckpt.errors import KeyRefused, NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.snapshot.catalog import (
    Identity,
    Progress,
    copied_so_far,
    data_key,
    references,
    silent,
    wrapped_of,
)
from vmckpt.store import verify
from vmckpt.store.chunk_index import Flags, Names, NameSet
from vmckpt.store.chunk_reader import Reader
from vmckpt.store.format import manifest
from vmckpt.store.format import pack as format_pack
from vmckpt.store.format.chunk_map import UNIT, ZERO, Digests, slots_of
from vmckpt.store.format.manifest import Manifest
from vmckpt.store.format.private_part import Private, RegionMap
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import fingerprint
from vmckpt.store.repository import Store, bare
from vmckpt.store.verify import Verified, VerifyProgress, Wrong, lacking, unread
from vmckpt.units import Bytes, show_count

Lengths = NDArray[np.uint32]
"""Lengths of chunks in bytes; 0: the chunk could not be read, or was not read yet."""
_BLOCK = 1 << 20
_AHEAD = 64
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Read:
    """The result of reading all chunks of a snapshot."""

    chunks: int
    """Number of intact chunks."""
    wrong: tuple[str, ...]


class Known:
    """Intact chunks of one sealing domain that were read, so that each is read only once."""

    def __init__(self) -> None:
        self._names = NameSet(())
        self._lengths: Lengths = np.zeros(0, dtype=np.uint32)

    def lengths(self, digests: Names) -> Lengths:
        """Return the length of each chunk in bytes; 0 if it is unknown."""
        at = self._names.positions(digests)
        found = np.zeros(len(digests), dtype=np.uint32)
        found[at >= 0] = self._lengths[at[at >= 0]]
        return found

    def add(self, digests: Names, lengths: Lengths) -> None:
        """Add the lengths, in bytes, of chunks that were read; chunks of length 0 are ignored."""
        good = lengths > 0
        names = NameSet([self._names.names, digests[good]])
        merged = np.zeros(len(names), dtype=np.uint32)
        merged[names.positions(self._names.names)] = self._lengths
        merged[names.positions(digests[good])] = lengths[good]
        self._names, self._lengths = names, merged


def read_contents(
    store: Store, private: Private, sealing: Sealing, known: Known, progress: Progress
) -> Read:  # fmt: skip
    """Read the chunks of a snapshot that are not in `known`, and check all chunks against its maps.

    Raises StoreError.
    """
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
            progress(copied_so_far("chunks", done))
    known.add(digests, lengths)
    wrong = [_unreadable(bad, len(chunks))] if bad else []
    wrong += misfits(private, lengths)
    return Read(len(chunks) - len(bad), tuple(wrong))


def misfits(private: Private, lengths: Lengths) -> Iterator[str]:
    """Yield each contradiction between the maps or stream parts and the chunk lengths. Pure.

    Unread chunks are ignored.
    """
    for region in private.regions:
        count = _too_short(region, lengths)
        if count:
            units = show_count(count, "unit")
            yield f"the map of {region.name} points outside the chunk for {units}"
    for part in private.facts.stream:
        sizes = lengths[np.array(part.chunks, dtype=np.int64)]
        if sizes.all() and int(sizes.sum(dtype=np.int64)) != part.size:
            yield f'part "{part.name}" of the migration stream differs in length from its chunks'


def _too_short(region: RegionMap, lengths: Lengths) -> int:
    """Return the number of units that do not fit into their chunk.

    A unit does not fit if it is beyond the chunk's end, or if the chunk's size is not a multiple of
    the unit's.
    """
    unit, count = UNIT[region.kind], 0
    for start in range(0, len(region.map), _BLOCK):
        part = region.map[start : start + _BLOCK]
        index, slot = slots_of(part[part != ZERO])
        size = lengths[index].astype(np.int64)
        ends = (slot.astype(np.int64) + 1) * unit
        count += int(((size > 0) & ((ends > size) | (size % unit != 0))).sum())
    return count


def _ahead(reader: Reader, chunks: Sequence[bytes], wanted: list[int]) -> Iterator[int]:
    """Yield the wanted indexes, and prefetch the chunks that follow."""
    reader.expect([chunks[one] for one in wanted[:_AHEAD]])
    for at in range(0, len(wanted), _AHEAD):
        coming = wanted[at + _AHEAD : at + 2 * _AHEAD]
        reader.expect([chunks[one] for one in coming])
        yield from wanted[at : at + _AHEAD]


def _unreadable(bad: "dict[int, str]", count: int) -> str:
    names = sorted(set(bad.values()))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{len(names)} of its {show_count(count, 'chunk')} damaged or missing:"
        f" {', '.join(names[:_MOST_NAMED])}{more}"
    )


@dataclass(slots=True)
class _Walk:
    """The state of reading the packs that snapshots need."""

    store: Store
    wanted: NameSet
    good: Flags
    """Which of the wanted chunks were found intact."""
    needed: Mapping[str, Names]
    seen: set[str] = field(default_factory=set)
    wrong: list[Wrong] = field(default_factory=list)
    damaged: list[tuple[str, str, Names]] = field(default_factory=list)
    """Damaged packs: key, error message, and the names of the damaged chunks."""
    bytes: int = 0


def verify_some(store: Store, ids: Sequence[str], progress: VerifyProgress) -> Verified:
    """Verify the packs that these snapshots need, as `store.verify.verify` does for all packs.

    Manifests that cannot be read are skipped. Raises StoreError.
    """
    needed = {}
    for id_ in ids:
        try:
            needed[id_] = references(store.manifest(id_))
        except (StoreDamaged, StoreNewer):
            continue
    wanted = NameSet(needed.values())
    walk = _Walk(store, wanted, np.zeros(len(wanted), dtype=bool), needed)
    # A garbage collection may move chunks to new packs meanwhile.
    while not walk.good.all() and _look(walk, progress):
        pass
    walk.wrong += [_damaged(walk, *one) for one in walk.damaged]
    if not walk.good.all():
        # The content of a pack without an index is unknown; it may include the missing chunks.
        walk.wrong += [
            Wrong(
                key=format_pack.key_of(pack),
                what=bare(exc, store, format_pack.key_of(pack)),
                kind=unread(exc),
            )
            for pack, exc in store.catalog.load().unreadable.items()
        ]
    lost = {id_: int((~walk.good[wanted.positions(names)]).sum()) for id_, names in needed.items()}
    kind = StoreError if any(one.kind is StoreError for one in walk.wrong) else StoreDamaged
    snapshots = [
        lacking(id_, count, len(needed[id_]), kind) for id_, count in lost.items() if count
    ]
    return Verified(
        wrong=(*walk.wrong, *snapshots),
        objects=len(walk.seen) + len(ids),
        bytes=Bytes(walk.bytes),
        snapshots=len(ids),
    )


def _look(walk: _Walk, progress: VerifyProgress) -> bool:
    """Read the packs that have wanted chunks and were not read yet. Returns whether there were any
    such packs."""
    sizes: dict[str, int] = {}
    for run in walk.store.catalog.load().index.runs:
        usable = {info.id for info in run.usable}
        ours = walk.wanted.positions(run.entries["name"]) >= 0
        for number in np.unique(run.entries["pack"][ours]).tolist():
            info = run.packs[number]
            if info.id in usable and info.id not in walk.seen:
                sizes[info.id] = info.size
    total = Bytes(walk.bytes + sum(sizes.values()))
    for pack, size in sorted(sizes.items()):
        walk.seen.add(pack)
        _pack(walk, pack)
        walk.bytes += size
        progress(Bytes(walk.bytes), total)
    return bool(sizes)


def _pack(walk: _Walk, pack: str) -> None:
    key = format_pack.key_of(pack)
    try:
        data = walk.store.backend.get(key)
    except NotInStore:
        return  # a garbage collection removed it; its needed chunks are in another pack
    except StoreError as exc:
        walk.wrong.append(Wrong(key=key, what=exc.message, kind=unread(exc)))
        return
    try:
        good = format_pack.parse(pack, data).rows["name"]
    except (StoreDamaged, StoreNewer) as exc:
        good, bad = format_pack.salvage(data)
        walk.damaged.append((key, exc.message, bad))
    at = walk.wanted.positions(good)
    walk.good[at[at >= 0]] = True


def _damaged(walk: _Walk, key: str, what: str, bad: Names) -> Wrong:
    """Return the finding for a damaged pack, with the snapshots that need its damaged chunks.

    Chunks with an intact copy in another pack do not count.
    """
    at = walk.wanted.positions(bad)
    at = at[at >= 0]
    lost = NameSet([walk.wanted.names[at[~walk.good[at]]]])
    by = [id_ for id_, names in walk.needed.items() if (lost.positions(names) >= 0).any()]
    return Wrong(key=key, what=what, snapshots=tuple(by))


class Depth(StrEnum):
    """How thoroughly snapshots are verified."""

    SEALED = "sealed"
    """Verify everything that can be verified without a private key."""
    OPENED = "opened"
    """Also verify that each snapshot's private part can be opened and matches its chunks."""
    DEEP = "deep"
    """Also verify that every chunk can be read and matches the maps."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """An object that is damaged, unreadable or not trusted."""

    key: str
    """Key of the object in the store."""
    what: str
    snapshots: tuple[str, ...] = ()
    """Snapshots that need the object."""
    kind: type[StoreError] = StoreDamaged

    def __str__(self) -> str:
        return str(Wrong(key=self.key, what=self.what, snapshots=self.snapshots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """The result of verifying snapshots."""

    where: str
    depth: Depth
    flaws: tuple[Flaw, ...]
    snapshots: int
    objects: int
    bytes: Bytes
    opened: int
    """Number of snapshots whose private part was read."""
    chunks: int
    """Number of chunks that were read and match their digests."""
    closed: Mapping[str, str]
    """Snapshots that were not opened, and why."""
    ids: tuple[str, ...] = ()
    """The snapshots that were verified."""

    def check(self) -> None:
        """Raise the most serious flaw, if there is one.

        Raises StoreDamaged, StoreNewer, KeyRefused or StoreError. KeyRefused is also raised if a
        deep verification could not open all snapshots.
        """
        for kind in (StoreDamaged, StoreNewer, KeyRefused, StoreError):
            these = [one for one in self.flaws if one.kind is kind]
            if len(these) == 1:
                raise kind(f"{self.where}: {these[0]}", hint=_MENDS[kind])
            if these:
                raise kind(f"{self.where}: {len(these)} {_WORDS[kind]}", hint=_MENDS[kind])
        if self.depth is Depth.DEEP and self.closed:
            id_, why = next(iter(self.closed.items()))
            more = f" and {len(self.closed) - 1} more" if len(self.closed) > 1 else ""
            raise KeyRefused(
                f"could not open snapshot {id_}{more}: {why}",
                hint="give the right file with --identity, or name the snapshots to verify",
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "store": self.where,
            "depth": str(self.depth),
            "good": not self.flaws,
            "snapshots": self.snapshots,
            "objects": self.objects,
            "bytes": self.bytes,
            "opened": self.opened,
            "chunks_read": self.chunks,
            "not_opened": dict(self.closed),
            "wrong": [
                {"object": one.key, "what": one.what, "snapshots": list(one.snapshots)}
                for one in self.flaws
            ],
        }


_WORDS = {
    StoreDamaged: "objects are damaged",
    StoreNewer: "objects were written by a newer version of vmckpt",
    KeyRefused: "snapshots were signed by untrusted writers",
    StoreError: "objects could not be read",
}
_MENDS = {
    StoreDamaged: "to repair from another store, run vmckpt snapshot verify --repair --from STORE",
    StoreNewer: "use the vmckpt version that wrote the object, or a newer one",
    KeyRefused: "if you trust the writer, run vmckpt snapshot keys trust NAME KEY",
    StoreError: "run vmckpt snapshot verify again when the store answers",
}


@dataclass(slots=True)
class _Run:
    """A verification in progress."""

    store: Store
    depth: Depth
    trusted: Collection[bytes]
    identity: Identity | None
    progress: Progress
    opened: int = 0
    chunks: int = 0
    closed: dict[str, str] = field(default_factory=dict)
    known: dict[str, Known] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    """Manifests that cannot be read."""


def prove(
    store: Store,
    ids: Sequence[str],
    depth: Depth,
    *,
    trusted: Collection[bytes],
    identity: Identity | None,
    progress: Progress = silent,
) -> Proved:
    """Verify snapshots and all objects that they need; without IDs, the whole store.

    `trusted` are the public keys of trusted writers. Raises StoreError if the store cannot be
    listed, and KeyRefused if the identity cannot be loaded. Flaws are returned, not raised.
    """
    found = _sealed(store, ids, progress)
    run = _Run(store, depth, trusted, identity, progress)
    looked_at = tuple(ids) or tuple(one.id for one in store.manifests())
    own = list(_snapshots(run, looked_at))
    # Wraps and manifests that cannot be read were checked twice; the second check reports more.
    twice = run.unread | {one.key for one in own if one.key.startswith("wraps/")}
    flaws = [
        Flaw(one.key, one.what, one.snapshots, one.kind)
        for one in found.wrong if one.key not in twice
    ]  # fmt: skip
    return Proved(
        where=store.backend.where,
        depth=depth,
        flaws=(*flaws, *own),
        snapshots=found.snapshots,
        objects=found.objects,
        bytes=found.bytes,
        opened=run.opened,
        chunks=run.chunks,
        closed=run.closed,
        ids=looked_at,
    )


def _sealed(store: Store, ids: Sequence[str], progress: Progress) -> Verified:
    def seen(done: Bytes, total: Bytes) -> None:
        progress(copied_so_far("packs", done, total))

    if ids:
        return verify_some(store, ids, seen)
    return verify.verify(store, references, progress=seen)


def _snapshots(run: _Run, ids: Iterable[str]) -> Iterator[Flaw]:
    for id_ in ids:
        key = f"snapshots/{id_}"
        try:
            found = manifest.decode(run.store.manifest(id_), id_, None)
        except NotInStore:
            continue  # it was deleted meanwhile
        except (StoreDamaged, StoreNewer) as exc:
            run.unread.add(key)
            yield Flaw(key, bare(exc, run.store, key), (id_,), type(exc))
            continue
        if bytes.fromhex(found.public.signer) not in run.trusted:
            # The private part of an unknown writer is not parsed, as it may be malicious.
            yield Flaw(key, "its writer is not trusted", (id_,), KeyRefused)
            continue
        yield from _one(run, found)


def _one(run: _Run, found: Manifest) -> Iterator[Flaw]:
    id_ = found.public.id
    key = f"wraps/{id_}"
    try:
        wrapped = wrapped_of(run.store, found)
        # An identity that cannot be loaded raises KeyRefused here; the snapshot is not damaged.
        if run.depth is Depth.SEALED or not _may_open(run, found, wrapped):
            return
    except (StoreDamaged, StoreNewer) as exc:
        yield Flaw(key, bare(exc, run.store, key), (id_,), type(exc))
        return
    try:
        opens = data_key(run.store, found, run.identity)
    except (StoreDamaged, StoreNewer) as exc:
        yield Flaw(key, bare(exc, run.store, key), (id_,), type(exc))
        return
    except KeyRefused as exc:
        # The data key is wrapped for this identity but cannot be unwrapped: the wrap was damaged
        # or manipulated.
        yield Flaw(key, bare(exc, run.store, key), (id_,))
        return
    yield from _inside(run, found, opens)


def _inside(run: _Run, found: Manifest, opens: bytes | None) -> Iterator[Flaw]:
    id_ = found.public.id
    key = f"snapshots/{id_}"
    try:
        private, sealing = found.opened(opens)
    except StoreDamaged as exc:
        yield Flaw(key, bare(exc, run.store, key), (id_,))
        return
    except KeyRefused as exc:
        yield Flaw(f"wraps/{id_}", exc.message, (id_,))
        return
    run.opened += 1
    if run.depth is Depth.DEEP:
        known = run.known.setdefault(sealing.domain, Known())
        read = read_contents(run.store, private, sealing, known, run.progress)
        run.chunks += read.chunks
        for what in read.wrong:
            yield Flaw(key, what, (id_,))


def _may_open(run: _Run, found: Manifest, wrapped: bytes | None) -> bool:
    """Return whether the identity opens a snapshot; if not, record why."""
    if wrapped is None:
        return True
    id_ = found.public.id
    if run.identity is None:
        run.closed[id_] = "it is encrypted, and no identity was given"
        return False
    own = fingerprint(public_of(run.identity()))
    if own not in wrapped_keys.recipients(wrapped, id_):
        run.closed[id_] = f"it is not encrypted for this identity (key {own})"
        return False
    return True
