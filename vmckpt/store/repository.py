"""A store of snapshots: what it is, who may write into it, and which snapshots it has.

A snapshot is a manifest, published last and deleted first; what it names lies in packs. To this
module a manifest is bytes. A store is opened where the inventory says it is, and no other one that
lies there.
"""

import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from vmckpt.errors import BadInput, NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.model.disk import StorePlace
from vmckpt.store import locks
from vmckpt.store.backend.base import Backend, Stored
from vmckpt.store.backend.factory import backend_of
from vmckpt.store.catalog import Catalog
from vmckpt.store.chunk_reader import CACHE, Reader
from vmckpt.store.fault_injection import fault
from vmckpt.store.format import manifest as format_manifest
from vmckpt.store.format.sealing import Sealing
from vmckpt.store.locks import Lock, LockPurpose
from vmckpt.store.pack_writer import PACK_SIZE, Writer
from vmckpt.store.receive import Receiver
from vmckpt.units import Bytes, Seconds

VERSION = 1
_FORMAT = "format"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Published:
    """A snapshot that is in the store."""

    id: str
    size: int
    """Of the manifest."""
    at: Seconds
    """When it was published, by the store's clock."""


class Store:
    """One store. May be used from several threads."""

    def __init__(self, backend: Backend, id_: str, cache: Path | None) -> None:
        """See `create` and `open`."""
        self.backend, self.id = backend, id_
        self.cache = cache / id_ if cache is not None else None
        self.catalog = Catalog(backend, self.cache)

    @classmethod
    def create(cls, backend: Backend, *, cache: Path | None = None) -> "Store":
        """Make a new store. Raises BadInput if there is one already, and StoreError."""
        made = {
            "version": VERSION,
            "id": secrets.token_hex(16),
            "made": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        }
        raw = format_manifest.written(_FORMAT, made)
        # A put that was tried again may have met what it had written itself.
        if not backend.put(_FORMAT, raw) and backend.get(_FORMAT) != raw:
            raise BadInput(f"{backend.where} is a store already")
        return cls(backend, str(made["id"]), cache)

    @classmethod
    def open(cls, backend: Backend, *, cache: Path | None = None) -> "Store":
        """Open a store. Raises NotInStore if there is none, StoreNewer, and StoreError.

        `cache`: a folder on this host for what the store's packs hold, shared by all stores.
        """
        try:
            raw = backend.get(_FORMAT)
        except NotInStore as exc:
            raise NotInStore(
                f"{backend.where} is no store", hint="make one with vmckpt snapshot init"
            ) from exc
        told = parse_format(raw, backend.where)
        return cls(backend, str(told["id"]), cache)

    def writer(
        self, sealing: Sealing, *, parallel: int = 2, pack_size: int = PACK_SIZE,
        beat: Seconds = locks.BEAT,
    ) -> Writer:  # fmt: skip
        """Who adds to the store; use it as a context manager."""
        return Writer(
            self.backend, self.catalog, sealing, parallel=parallel, pack_size=pack_size, beat=beat
        )

    def receiver(self, *, encrypted: bool, pack_size: int = PACK_SIZE) -> Receiver:
        """Who adds what another store has sealed; use it as a context manager."""
        return Receiver(self.backend, self.catalog, encrypted=encrypted, pack_size=pack_size)

    def reader(self, sealing: Sealing, *, parallel: int = 2, cache: Bytes = CACHE) -> Reader:
        """Who reads from the store; use it as a context manager."""
        return Reader(self.backend, self.catalog, sealing, parallel=parallel, cache=cache)

    def publish(
        self, id_: str, manifest: bytes, wraps: bytes | None, *, writer: Writer | Receiver
    ) -> None:  # fmt: skip
        """Make a snapshot visible, once its writer has finished and before it is closed.

        Raises BadInput if there is another one of that id, and StoreError; then nothing is visible.
        """
        key = f"snapshots/{_checked(id_)}"
        if not writer.finished:
            raise ValueError("a snapshot is published after its chunks are in the store")
        writer.lock.still_ours()
        fault("publish: checked")
        if wraps is not None and not any(self.backend.keys(key)):
            self.put_wraps(id_, wraps)
        fault("publish: wraps")
        if not self.backend.put(key, manifest) and self.backend.get(key) != manifest:
            raise BadInput(f"{self.backend.where} has another snapshot {id_} already")
        fault("publish: manifest")
        # A collection may have found the keys without their manifest, and removed them.
        if wraps is not None and self.wraps(id_) is None:
            self.put_wraps(id_, wraps)
        # A collection that found us dead meanwhile may have taken what the manifest names.
        try:
            writer.lock.still_ours()
        except StoreError:
            self.backend.delete(key)
            raise

    def manifests(self) -> list[Published]:
        """All snapshots, in order of their ids. What has no id for a name is of somebody else."""
        found = [
            Published(one.key.rpartition("/")[2], one.size, one.modified_at)
            for one in self.backend.keys("snapshots/")
            if is_id(one.key.removeprefix("snapshots/"))
        ]
        return sorted(found, key=lambda one: one.id)

    def manifest(self, id_: str) -> bytes:
        """What was published. Raises NotInStore."""
        return self.backend.get(f"snapshots/{_checked(id_)}")

    def wraps(self, id_: str) -> bytes | None:
        """The wrapped keys of a snapshot, if it has any. Raises StoreDamaged."""
        key = f"wraps/{_checked(id_)}"
        try:
            return format_manifest.unframed(key, self.backend.get(key), self.backend.where)
        except NotInStore:
            return None

    def put_wraps(self, id_: str, wraps: bytes) -> None:
        """Put wrapped keys in place of those that a snapshot has."""
        key = f"wraps/{_checked(id_)}"
        self.backend.put(key, format_manifest.framed(key, wraps), replace=True)

    def pins(self) -> frozenset[str]:
        """Snapshots that may not be deleted."""
        return frozenset(one.key.rpartition("/")[2] for one in self.backend.keys("pins/"))

    def pin_reason(self, id_: str) -> str | None:
        """What was said when it was pinned; None: it is not. Raises StoreError."""
        key = f"pins/{_checked(id_)}"
        try:
            return str(
                format_manifest.parsed(key, self.backend.get(key), self.backend.where).get(
                    "why", ""
                )
            )
        except NotInStore:
            return None
        except StoreDamaged:
            return ""

    def pin(self, id_: str, why: str = "") -> None:
        """Keep a snapshot from being deleted. Raises NotInStore, also if it is just being deleted.

        A pin is written and then looks for a deletion; a deletion is written and then looks for a
        pin: one of the two sees the other.
        """
        key, manifest = f"pins/{_checked(id_)}", f"snapshots/{_checked(id_)}"
        self.backend.put(key, format_manifest.written(key, {"why": why}), replace=True)
        fault("pin: put")
        now = max(one.modified_at for one in self.backend.keys(key))
        if any(
            lock.work is LockPurpose.DELETE and lock.about == id_ and lock.alive(now, locks.LIFE)
            for lock in locks.list_locks(self.backend)
        ) or not any(self.backend.keys(manifest)):
            self.backend.delete(key)
            raise NotInStore(f"{self.backend.where} has no snapshot {id_}, or not for long")

    def unpin(self, id_: str) -> None:
        """Let a snapshot be deleted again. No error if it may be already."""
        self.backend.delete(f"pins/{_checked(id_)}")

    def delete(self, id_: str) -> None:
        """Delete a snapshot; what it alone needs is removed by later collections.

        Raises BadInput if it is pinned, NotInStore, and StoreError.
        """
        manifest = f"snapshots/{_checked(id_)}"
        if not any(self.backend.keys(manifest)):
            raise NotInStore(f"{self.backend.where} has no snapshot {id_}")
        lock = Lock(self.backend, LockPurpose.DELETE, about=id_)
        lock.take()
        try:
            fault("delete: locked")
            if id_ in self.pins():
                raise BadInput(f"snapshot {id_} is pinned", hint=f"vmckpt snapshot unpin {id_}")
            fault("delete: checked")
            self.backend.delete(manifest)
            fault("delete: manifest")
            self.backend.delete(f"wraps/{id_}")
            fault("delete: wraps")
            self.backend.delete(f"verified/{id_}")
        finally:
            lock.release()


def parse_format(raw: bytes, where: str) -> dict[str, object]:
    """What a store says of itself. Raises StoreDamaged, StoreNewer."""
    told = format_manifest.parsed(_FORMAT, raw, where)
    version = told.get("version")
    if not isinstance(version, int) or not re.fullmatch("[0-9a-f]{32}", str(told.get("id"))):
        raise StoreDamaged(f"{where}: {_FORMAT} is not what a store writes")
    if version > VERSION:
        raise StoreNewer(
            f"{where} is a store of version {version}; this vmckpt knows {VERSION}",
            hint="use the vmckpt that made it, or a newer one",
        )
    return told


def small_objects(backend: Backend) -> Iterator[Stored]:
    """Everything but packs and manifests."""
    for prefix in (_FORMAT, "wraps/", "pins/", "verified/", "locks/", "condemned/"):
        yield from backend.keys(prefix)


def bare(error: StoreError, store: Store, key: str) -> str:
    """What is wrong, without the names that are told anyway."""
    message = error.message.removeprefix(f"{store.backend.where}: ").removeprefix(key)
    return message.removeprefix(": ").removeprefix(" is damaged: ").strip()


def is_id(word: str) -> bool:
    """Whether a snapshot can be called so."""
    return _ID.fullmatch(word) is not None


def _checked(id_: str) -> str:
    if not is_id(id_):
        raise BadInput(f"{id_[:80]!r} is no snapshot's id")
    return id_


def opened(place: StorePlace, *, cache: Path | None = None) -> Store:
    """The store of a place. Raises StoreError, also if it is not the one that is meant: a folder
    where nothing is mounted may have a store of its own, and nobody would look for it there."""
    try:
        store = Store.open(backend_of(place.url), cache=cache)
    except NotInStore as exc:
        if place.id is not None:
            exc.hint = "is it mounted there?"
        raise
    if place.id not in (None, store.id):
        raise StoreError(
            f"{store.backend.where} is another store here than {place.name} is for its controller",
            hint="is it mounted there?",
        )
    return store


def identified(place: StorePlace) -> StorePlace:
    """A place with the id of its store, if that can be seen from here."""
    try:
        return replace(place, id=opened(place).id)
    except StoreError:
        return place  # whoever works there tells what is wrong with it
