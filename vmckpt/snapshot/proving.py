"""Proves snapshots: their objects bit by bit, their signatures, and with a key what is inside.

What is wrong is told by object, once, with the snapshots that need it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vmckpt.errors import KeyRefused, NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.snapshot import deep
from vmckpt.snapshot.deep import Known
from vmckpt.snapshot.keeping import (
    Identity,
    Progress,
    data_key,
    references,
    silent,
    told,
    wrapped_of,
)
from vmckpt.snapshot.whole import verify_some
from vmckpt.store import verify
from vmckpt.store.format import manifest
from vmckpt.store.format.manifest import Manifest
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import fingerprint
from vmckpt.store.repository import Store, bare
from vmckpt.store.verify import Verified, Wrong
from vmckpt.units import Bytes


class Depth(StrEnum):
    """How much is looked at."""

    SEALED = "sealed"
    """What can be proved without a private key."""
    OPENED = "opened"
    """And that each snapshot's private part can be opened and names these chunks."""
    DEEP = "deep"
    """And every chunk is read, and fits its place."""


@dataclass(frozen=True, slots=True)
class Flaw:
    """One thing that is not as it should be."""

    key: str
    """The object."""
    what: str
    snapshots: tuple[str, ...] = ()
    """Those that need it."""
    kind: type[StoreError] = StoreDamaged

    def __str__(self) -> str:
        return str(Wrong(key=self.key, what=self.what, snapshots=self.snapshots))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """What was looked at, and what is wrong."""

    where: str
    depth: Depth
    flaws: tuple[Flaw, ...]
    snapshots: int
    objects: int
    bytes: Bytes
    opened: int
    """Snapshots of which the private part was read."""
    chunks: int
    """That were read and are what they are named for."""
    closed: Mapping[str, str]
    """Snapshots that were not opened, and why."""
    ids: tuple[str, ...] = ()
    """Those that were looked at."""

    def check(self) -> None:
        """Raises the gravest of what is wrong, and KeyRefused if what was asked was not done."""
        for kind in (StoreDamaged, StoreNewer, KeyRefused, StoreError):
            these = [one for one in self.flaws if one.kind is kind]
            if len(these) == 1:
                raise kind(f"{self.where}: {these[0]}", mend=_MENDS[kind])
            if these:
                raise kind(f"{self.where}: {len(these)} {_WORDS[kind]}", mend=_MENDS[kind])
        if self.depth is Depth.DEEP and self.closed:
            id_, why = next(iter(self.closed.items()))
            more = f", nor {len(self.closed) - 1} more" if len(self.closed) > 1 else ""
            raise KeyRefused(
                f"snapshot {id_}{more} could not be read: {why}",
                mend="name the identity that opens it, or the snapshots to be read",
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
    StoreDamaged: "things are not what was written",
    StoreNewer: "objects are of a newer version",
    KeyRefused: "snapshots were signed by writers that are not trusted here",
    StoreError: "objects could not be read, and nothing is known of them",
}
_MENDS = {
    StoreDamaged: "vmckpt snapshot verify --repair --from STORE brings back what another store has",
    StoreNewer: "use the vmckpt that wrote it, or a newer one",
    KeyRefused: "if you know the writer: vmckpt snapshot keys trust NAME KEY",
    StoreError: "verify again once the store answers",
}


@dataclass(slots=True)
class _Run:
    """A verification at work."""

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
    """Look at some snapshots and all they need, or without ids at all of a store.

    Raises StoreError if the store cannot be read at all, and KeyRefused if the identity cannot.
    """
    found = _sealed(store, ids, progress)
    run = _Run(store, depth, trusted, identity, progress)
    looked_at = tuple(ids) or tuple(one.id for one in store.manifests())
    own = list(_snapshots(run, looked_at))
    # Wraps and manifests that cannot be read were looked at twice: the closer look tells more.
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
        progress(told("packs", done, total))

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
            # What somebody unknown wrote is not opened: it may be made to do harm.
            yield Flaw(key, "its writer is not trusted here", (id_,), KeyRefused)
            continue
        yield from _one(run, found)


def _one(run: _Run, found: Manifest) -> Iterator[Flaw]:
    id_ = found.public.id
    key = f"wraps/{id_}"
    try:
        wrapped = wrapped_of(run.store, found)
        if run.depth is Depth.SEALED or not _may_open(run, found, wrapped):
            return
        opens = data_key(run.store, found, run.identity)
    except (StoreDamaged, StoreNewer) as exc:
        yield Flaw(key, bare(exc, run.store, key), (id_,), type(exc))
        return
    except KeyRefused as exc:
        # It is for this identity, and does not open: that is damage, or somebody's doing.
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
        read = deep.read(run.store, private, sealing, known, run.progress)
        run.chunks += read.chunks
        for what in read.wrong:
            yield Flaw(key, what, (id_,))


def _may_open(run: _Run, found: Manifest, wrapped: bytes | None) -> bool:
    """Whether there is a key for it; if not, that is noted."""
    if wrapped is None:
        return True
    id_ = found.public.id
    if run.identity is None:
        run.closed[id_] = "it is encrypted, and no identity was named"
        return False
    own = fingerprint(public_of(run.identity()))
    if own not in wrapped_keys.recipients(wrapped, id_):
        run.closed[id_] = f"it is not for this identity (key {own})"
        return False
    return True
