"""Read the contents of stores repeatedly; data that cannot change is read only once."""

from collections.abc import Callable, Collection

from vmckpt.errors import NotInStore, StoreDamaged, StoreError, StoreNewer
from vmckpt.scheduler.agenda import Held, Shelf
from vmckpt.snapshot.retention import Kept
from vmckpt.snapshot.verify import results
from vmckpt.snapshot.verify.results import UNKNOWN, VerifySummary
from vmckpt.store.backend.base import Stored
from vmckpt.store.format import manifest
from vmckpt.store.format.metadata import Public
from vmckpt.store.repository import Store


class Shelves:
    """The stores of an inventory, with a cache. `open_` opens a store by name."""

    def __init__(
        self, open_: Callable[[str], Store], trusted: Callable[[], Collection[bytes]]
    ) -> None:
        self._open, self._trusted = open_, trusted
        self._stores: dict[str, Store] = {}
        self._public: dict[tuple[str, str], Public | None] = {}
        """Public metadata by store ID and snapshot ID; None if the metadata cannot be read."""
        self._verdicts: dict[tuple[str, str], tuple[Stored, VerifySummary]] = {}

    def store(self, name: str) -> Store:
        """Return an open store; the same object as before unless its ID changed. Raises StoreError.

        The store is checked on each call, because the mount point of an unmounted disk would look
        like a store without snapshots.
        """
        try:
            found = self._open(name)
        except StoreError:
            self._stores.pop(name, None)
            raise
        known = self._stores.get(name)
        if known is None or known.id != found.id:
            self._stores[name] = known = found
        return known

    def look(self, name: str) -> Shelf:
        """Return the snapshots of a store that a trusted writer signed. Raises StoreError."""
        try:
            return self._looked(self.store(name))
        except StoreError:
            # When the store answers again, it may be a different store.
            self._stores.pop(name, None)
            raise

    def _looked(self, store: Store) -> Shelf:
        trusted, pins = self._trusted(), store.pins()
        checks = {one.key.removeprefix(results.PREFIX): one
                  for one in store.backend.keys(results.PREFIX)}  # fmt: skip
        found, there = {}, []
        for one in store.manifests():
            there.append(one.id)
            public = self._read(store, one.id)
            if public is None or bytes.fromhex(public.signer) not in trusted:
                continue
            verdict = self._verdict(store, one.id, checks.get(one.id), trusted)
            kept = Kept(
                id=one.id,
                guest=public.guest_uuid,
                made_at=public.made_at,
                schedule=public.schedule,
                pinned=one.id in pins,
                good=verdict.good,
                group=public.group,
            )
            found[one.id] = Held(kept=kept, looked_at=verdict.looked_at)
        self._forget(store, set(there))
        return found

    def _forget(self, store: Store, there: set[str]) -> None:
        """Remove deleted snapshots from the cache, so that it does not grow for years."""
        gone = [key for key in self._public if key[0] == store.id and key[1] not in there]
        for key in gone:
            del self._public[key]
            self._verdicts.pop(key, None)

    def _read(self, store: Store, id_: str) -> Public | None:
        key = (store.id, id_)
        if key not in self._public:
            try:
                self._public[key] = manifest.decode(store.manifest(id_), id_, None).public
            except NotInStore:
                return None
            except (StoreDamaged, StoreNewer):
                self._public[key] = None
        return self._public[key]

    def _verdict(
        self, store: Store, id_: str, there: Stored | None, trusted: Collection[bytes]
    ) -> VerifySummary:
        if there is None:
            return UNKNOWN
        known = self._verdicts.get((store.id, id_))
        if known is None or known[0] != there:
            known = (there, results.verdict(results.load(store, id_, trusted)))
            self._verdicts[store.id, id_] = known
        return known[1]
