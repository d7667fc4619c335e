"""A snapshot store: open and create it, write to it, and list, pin and delete its snapshots.

A snapshot is a manifest, published last and deleted first. Packs contain the chunks that the
manifest names. This module treats a manifest as bytes. `opened` refuses a location whose store is
not the store recorded in the inventory.
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
    """A snapshot in the store."""

    id: str
    size: int
    """Size of the manifest in bytes."""
    at: Seconds
    """When the snapshot was published, by the store's clock."""


class Store:
    """A snapshot store. Safe to use from several threads."""

    def __init__(self, backend: Backend, id_: str, cache: Path | None) -> None:
        """See `create` and `open`."""
        self.backend, self.id = backend, id_
        self.cache = cache / id_ if cache is not None else None
        self.catalog = Catalog(backend, self.cache)

    @classmethod
    def create(cls, backend: Backend, *, cache: Path | None = None) -> "Store":
        """Create a new store. `cache`: directory for copies of its pack indexes; None: no cache.

        Raises BadInput if the location already contains a store, and StoreError.
        """
        made = {
            "version": VERSION,
            "id": secrets.token_hex(16),
            "made": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds"),
        }
        raw = format_manifest.written(_FORMAT, made)
        # A retried put may find the object that the first attempt wrote.
        if not backend.put(_FORMAT, raw) and backend.get(_FORMAT) != raw:
            raise BadInput(f"{backend.where} already contains a store")
        return cls(backend, str(made["id"]), cache)

    @classmethod
    def open(cls, backend: Backend, *, cache: Path | None = None) -> "Store":
        """Open a store.

        `cache` is a directory on this host that caches pack indexes, shared by all stores; None:
        the indexes are kept in memory. Raises NotInStore if the backend contains no store,
        StoreNewer, and StoreError.
        """
        try:
            raw = backend.get(_FORMAT)
        except NotInStore as exc:
            raise NotInStore(
                f"{backend.where} is not a store", hint="create one with vmckpt snapshot init"
            ) from exc
        told = parse_format(raw, backend.where)
        return cls(backend, str(told["id"]), cache)

    def writer(
        self, sealing: Sealing, *, parallel: int = 2, pack_size: int = PACK_SIZE,
        beat: Seconds = locks.BEAT,
    ) -> Writer:  # fmt: skip
        """Return a writer, which adds chunks to the store. Use it as a context manager.

        `parallel`: number of threads that seal; `pack_size`: in bytes; `beat`: interval, in
        seconds, at which the lock is refreshed.
        """
        return Writer(
            self.backend, self.catalog, sealing, parallel=parallel, pack_size=pack_size, beat=beat
        )

    def receiver(self, *, encrypted: bool, pack_size: int = PACK_SIZE) -> Receiver:
        """Return a receiver, which adds chunks that another store has sealed.

        Use the receiver as a context manager. `encrypted`: see Receiver.
        """
        return Receiver(self.backend, self.catalog, encrypted=encrypted, pack_size=pack_size)

    def reader(self, sealing: Sealing, *, parallel: int = 2, cache: Bytes = CACHE) -> Reader:
        """Return a reader for the store's chunks. Use the reader as a context manager.

        `parallel`: number of threads that read ahead; `cache`: maximum size of the cache of chunks,
        in bytes.
        """
        return Reader(self.backend, self.catalog, sealing, parallel=parallel, cache=cache)

    def publish(
        self, id_: str, manifest: bytes, wraps: bytes | None, *, writer: Writer | Receiver
    ) -> None:  # fmt: skip
        """Make a snapshot visible. Call this after `writer.finish()` and before the writer closes.

        Raises BadInput if a different snapshot has this ID, StoreError, and ValueError if the
        writer has not finished. The snapshot is then not visible, unless the store failed: then
        this is unknown.
        """
        key = f"snapshots/{_checked(id_)}"
        if not writer.finished:
            raise ValueError("a snapshot can be published only after all its chunks are stored")
        writer.lock.still_ours()
        fault("publish: checked")
        if wraps is not None and not any(self.backend.keys(key)):
            self.put_wraps(id_, wraps)
        fault("publish: wraps")
        if not self.backend.put(key, manifest) and self.backend.get(key) != manifest:
            raise BadInput(f"{self.backend.where} already has a different snapshot {id_}")
        fault("publish: manifest")
        try:
            # A garbage collection may have removed the wrapped keys, as the manifest did not exist
            # yet.
            if wraps is not None and self.wraps(id_) is None:
                self.put_wraps(id_, wraps)
            # A garbage collection that considered this writer dead may have removed chunks that the
            # manifest names.
            writer.lock.still_ours()
        except StoreError:
            self.backend.delete(key)
            raise

    def manifests(self) -> list[Published]:
        """Return all snapshots, sorted by ID. Raises StoreError.

        Skips objects whose name is not a snapshot ID, because vmckpt did not write them.
        """
        found = [
            Published(one.key.rpartition("/")[2], one.size, one.modified_at)
            for one in self.backend.keys("snapshots/")
            if is_id(one.key.removeprefix("snapshots/"))
        ]
        return sorted(found, key=lambda one: one.id)

    def manifest(self, id_: str) -> bytes:
        """Return the manifest of a snapshot. Raises NotInStore, StoreError, BadInput."""
        return self.backend.get(f"snapshots/{_checked(id_)}")

    def wraps(self, id_: str) -> bytes | None:
        """Return the wrapped keys of a snapshot; None if the snapshot has no wrapped keys.

        Raises StoreDamaged, StoreError, BadInput.
        """
        key = f"wraps/{_checked(id_)}"
        try:
            return format_manifest.unframed(key, self.backend.get(key), self.backend.where)
        except NotInStore:
            return None

    def put_wraps(self, id_: str, wraps: bytes) -> None:
        """Replace the wrapped keys of a snapshot. Raises StoreError, BadInput."""
        key = f"wraps/{_checked(id_)}"
        self.backend.put(key, format_manifest.framed(key, wraps), replace=True)

    def pins(self) -> frozenset[str]:
        """Return the IDs of all pinned snapshots, which cannot be deleted. Raises StoreError."""
        return frozenset(one.key.rpartition("/")[2] for one in self.backend.keys("pins/"))

    def pin_reason(self, id_: str) -> str | None:
        """Return the reason why a snapshot was pinned; None if the snapshot is not pinned.

        The reason is empty if no reason was given or the pin is damaged. Raises StoreError,
        BadInput.
        """
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
        """Protect a snapshot from deletion.

        Raises NotInStore if the snapshot does not exist or is being deleted, StoreError, BadInput.

        `pin` writes a pin and then checks for a deletion; `delete` takes a lock and then checks for
        a pin. If both run at the same time, at least one of them notices the other.
        """
        key, manifest = f"pins/{_checked(id_)}", f"snapshots/{_checked(id_)}"
        self.backend.put(key, format_manifest.written(key, {"why": why}), replace=True)
        fault("pin: put")
        now = max((one.modified_at for one in self.backend.keys(key)), default=None)
        if now is None:  # another process removed the pin meanwhile
            self.pin(id_, why)
            return
        if any(
            lock.work is LockPurpose.DELETE and lock.about == id_ and lock.alive(now, locks.LIFE)
            for lock in locks.list_locks(self.backend)
        ) or not any(self.backend.keys(manifest)):
            self.backend.delete(key)
            raise NotInStore(f"{self.backend.where} has no snapshot {id_}, or it is being deleted")

    def unpin(self, id_: str) -> None:
        """Remove a snapshot's pin, so that the snapshot can be deleted again.

        Does nothing if the snapshot is not pinned. Raises StoreError, BadInput.
        """
        self.backend.delete(f"pins/{_checked(id_)}")

    def delete(self, id_: str) -> None:
        """Delete a snapshot. Later garbage collections remove chunks that no other snapshot needs.

        Raises BadInput if the snapshot is pinned, NotInStore, and StoreError.
        """
        manifest = f"snapshots/{_checked(id_)}"
        if not any(self.backend.keys(manifest)):
            raise NotInStore(f"{self.backend.where} has no snapshot {id_}")
        lock = Lock(self.backend, LockPurpose.DELETE, about=id_)
        lock.take()
        try:
            fault("delete: locked")
            if id_ in self.pins():
                raise BadInput(f"snapshot {id_} is pinned", hint=f"run vmckpt snapshot unpin {id_}")
            fault("delete: checked")
            self.backend.delete(manifest)
            fault("delete: manifest")
            self.backend.delete(f"wraps/{id_}")
            fault("delete: wraps")
            self.backend.delete(f"verified/{id_}")
        finally:
            lock.release()


def parse_format(raw: bytes, where: str) -> dict[str, object]:
    """Parse a store's `format` object: its version and ID. Raises StoreDamaged, StoreNewer."""
    told = format_manifest.parsed(_FORMAT, raw, where)
    version = told.get("version")
    if not isinstance(version, int) or not re.fullmatch("[0-9a-f]{32}", str(told.get("id"))):
        raise StoreDamaged(f"{where}: {_FORMAT} has no valid version or ID")
    if version > VERSION:
        raise StoreNewer(
            f"{where} has store version {version}; this vmckpt supports versions up to {VERSION}",
            hint="use the vmckpt version that created the store, or a newer one",
        )
    return told


def small_objects(backend: Backend) -> Iterator[Stored]:
    """List all objects except packs and manifests. Raises StoreError."""
    for prefix in (_FORMAT, "wraps/", "pins/", "verified/", "locks/", "condemned/"):
        yield from backend.keys(prefix)


def bare(error: StoreError, store: Store, key: str) -> str:
    """Return an error's message without the store's and the object's name at the beginning.

    `key`: the object's key in the store.
    """
    message = error.message.removeprefix(f"{store.backend.where}: ").removeprefix(key)
    return message.removeprefix(": ").removeprefix(" is damaged: ").strip()


def is_id(word: str) -> bool:
    """Return whether a string is a valid snapshot ID."""
    return _ID.fullmatch(word) is not None


def _checked(id_: str) -> str:
    if not is_id(id_):
        raise BadInput(f"{id_[:80]!r} is not a snapshot ID")
    return id_


def opened(place: StorePlace, *, cache: Path | None = None) -> Store:
    """Open a store that is listed in the inventory.

    `cache`: directory for copies of its pack indexes; None: no cache. Raises NotInStore if the
    location contains no store, BadInput for an invalid URL, and StoreError. Also raises StoreError
    if the location contains a different store: an unmounted mount point may contain a store, and
    snapshots written to that store would not be found again.
    """
    try:
        store = Store.open(backend_of(place.url), cache=cache)
    except NotInStore as exc:
        if place.id is not None:
            exc.hint = "check that the store is mounted there"
        raise
    if place.id not in (None, store.id):
        raise StoreError(
            f"{store.backend.where} is not the store recorded as {place.name} on the controller",
            hint="check that the store is mounted there",
        )
    return store


def identified(place: StorePlace) -> StorePlace:
    """Fill in the store's ID. Returns `place` unchanged if the store cannot be opened here.

    Raises BadInput for an invalid URL.
    """
    try:
        return replace(place, id=opened(place).id)
    except StoreError:
        return place  # the agent that uses the store reports the error
