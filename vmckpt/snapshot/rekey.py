"""Change the keys that open a store's snapshots, by replacing only the wrapped data keys."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from vmckpt.errors import KeyRefused, NotInStore, StoreDamaged, StoreNewer
from vmckpt.snapshot.catalog import wrapped_of
from vmckpt.store.format import manifest
from vmckpt.store.format.manifest import Manifest
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import fingerprint
from vmckpt.store.repository import Store, bare


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """The result of a key rotation in one store."""

    store: str
    rewrapped: tuple[str, ...]
    open: tuple[str, ...]
    """Snapshots that are not encrypted."""
    refused: Mapping[str, str]
    """Snapshots that were skipped, with the reason: the identity does not open them, or their
    writer is not trusted."""
    damaged: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "rewrapped": list(self.rewrapped),
            "not_encrypted": list(self.open),
            "refused": dict(self.refused),
            "damaged": dict(self.damaged),
        }


def rotate(
    store: Store,
    identity: X25519PrivateKey,
    admins: Collection[bytes],
    trusted: Collection[bytes],
    *,
    dry_run: bool,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Rotated:
    """Wrap the data keys of all snapshots for exactly these administrators.

    Snapshots that the identity does not open are skipped. `dry_run`: change nothing. `progress` is
    called with the number of snapshots done and the total. Raises StoreError.
    """
    rewrapped, open_ = [], []
    refused: dict[str, str] = {}
    damaged: dict[str, str] = {}
    there = store.manifests()
    for number, one in enumerate(there, 1):
        try:
            found = manifest.decode(store.manifest(one.id), one.id, trusted)
            wrapped = wrapped_of(store, found)
            if wrapped is None:
                open_.append(one.id)
                continue
            fresh = rewrap(found, wrapped, identity, admins)
            if not dry_run:
                store.put_wraps(one.id, fresh)
            rewrapped.append(one.id)
        except NotInStore:
            continue  # it was deleted meanwhile
        except KeyRefused as exc:
            refused[one.id] = exc.message
        except (StoreDamaged, StoreNewer) as exc:
            damaged[one.id] = bare(exc, store, f"snapshots/{one.id}")
        progress(number, len(there))
    return Rotated(
        store=store.backend.where,
        rewrapped=tuple(rewrapped),
        open=tuple(open_),
        refused=refused,
        damaged=damaged,
    )


def rewrap(
    found: Manifest, wrapped: bytes, identity: X25519PrivateKey, admins: Collection[bytes]
) -> bytes:
    """Return new wraps of the same data key.

    `wrapped`: the present wraps; `identity`: opens one of them; `admins`: public keys for which the
    data key is wrapped from now on.

    Raises KeyRefused if the data key is not wrapped for this identity, StoreDamaged if the wrap
    contains a different data key, and StoreNewer.
    """
    id_ = found.public.id
    if fingerprint(public_of(identity)) not in wrapped_keys.recipients(wrapped, id_):
        raise KeyRefused(f"snapshot {id_} is not encrypted for this identity")
    try:
        key = wrapped_keys.unwrap(wrapped, id_, identity)
    except KeyRefused as exc:
        raise StoreDamaged(f"wraps/{id_}: {exc.message}") from exc
    # An attacker can wrap another key for this identity; that key must not replace the good wraps.
    if manifest.data_key_id(key) != found.public.data_key_id:
        raise StoreDamaged(f"wraps/{id_}: its wrap for this identity has a different data key")
    return wrapped_keys.wrap(key, id_, admins)
