"""List the public metadata of a store's snapshots, with a cache on the client.

The manifest of a large guest takes many MiB and never changes. Therefore its public part is cached
once the manifest has been verified. The cache key is the manifest's ID, size and time.
"""

import contextlib
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from vmckpt.errors import NotInStore, StoreDamaged, StoreNewer
from vmckpt.store.format import manifest
from vmckpt.store.format.metadata import PUBLIC, Public, dumped, loaded
from vmckpt.store.repository import Published, Store

Told = Public | StoreDamaged | StoreNewer
_KEY = "publics"
_FIRST = 64 << 10
"""Bytes of the first read from a manifest: usually enough for header and public part."""


def proved(store: Store, ids: Collection[str] | None = None) -> dict[str, Told]:
    """Return each manifest's public part, or the error if the manifest is invalid, by ID.

    Verifies checksum and signature, but accepts any writer. `ids` selects the snapshots to read;
    None: all snapshots. Raises StoreError.
    """
    kept = _load(store)
    found: dict[str, Told] = {}
    rows: dict[str, Any] = {}
    for one in store.manifests():
        row = kept.get(one.id)
        if ids is None or one.id in ids:
            known = _known(row, one)
            told = known or _read(store, one.id)
            if told is None:
                continue
            found[one.id] = told
            if known is None:
                row = _row(one, told) if isinstance(told, Public) else None
        if row is not None:
            rows[one.id] = row
    if rows != kept:
        _save(store, rows)
    return found


def names(store: Store) -> dict[str, Public | None]:
    """Return each manifest's unverified public part, by ID; None if it cannot be read.

    Use this only to find a snapshot by name, and then verify that snapshot. Raises StoreError.
    """
    kept = _load(store)
    found: dict[str, Public | None] = {}
    for one in store.manifests():
        public = _known(kept.get(one.id), one) or _head(store, one)
        if public is None:
            told = _read(store, one.id)
            public = told if isinstance(told, Public) else None
        found[one.id] = public
    return found


def _read(store: Store, id_: str) -> Told | None:
    """Read and verify a manifest. Returns None if the manifest has been deleted meanwhile."""
    try:
        return manifest.decode(store.manifest(id_), id_, None).public
    except NotInStore:
        return None
    except (StoreDamaged, StoreNewer) as exc:
        return exc


def _head(store: Store, one: Published) -> Public | None:
    try:
        return manifest.head(store.backend.get(f"snapshots/{one.id}", 0, _FIRST), one.id, one.size)
    except NotInStore:
        return None


def _row(one: Published, public: Public) -> dict[str, Any]:
    return {"size": one.size, "at": one.at, "public": dumped(PUBLIC, public).decode()}


def _known(row: Any, one: Published) -> Public | None:
    """Return the cached public part; None if it is missing or belongs to a different object."""
    try:
        if row is not None and (row["size"], row["at"]) == (one.size, one.at):
            public = loaded(PUBLIC, row["public"].encode())
            return public if public.id == one.id else None
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return None


def _load(store: Store) -> Mapping[str, Any]:
    if store.cache is None:
        return {}
    try:
        return manifest.parsed(_KEY, (store.cache / _KEY).read_bytes(), "")
    except (OSError, StoreDamaged):
        return {}


def _save(store: Store, rows: Mapping[str, Any]) -> None:
    """Write the cache. Ignores errors, because without the cache the only loss is time."""
    if store.cache is None:
        return
    temporary = store.cache / f"{_KEY}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        store.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            temporary.write_bytes(manifest.written(_KEY, rows))
            temporary.rename(store.cache / _KEY)
        finally:
            temporary.unlink(missing_ok=True)
