"""Carry out a service's work on stores, in a thread; setting `stop` cancels the work."""

import threading
import time
from dataclasses import dataclass
from typing import Any

from vmckpt.errors import BadInput, Cancelled, NotInStore
from vmckpt.journal import controller_identity
from vmckpt.policy.model import Check
from vmckpt.scheduler.jobs import CollectGarbage, CopySnapshot, PruneSnapshots, VerifySnapshots
from vmckpt.scheduler.store_cache import Shelves
from vmckpt.snapshot import catalog, copy
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.verify import results, verify
from vmckpt.snapshot.verify.verify import Depth
from vmckpt.store import gc
from vmckpt.store.keys.keyring import Keyring
from vmckpt.units import show_bytes, show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Did:
    """The result of a piece of work."""

    text: str
    """One line for display."""
    values: dict[str, Any]
    good: bool = True
    """Whether the work succeeded; False: the store is damaged, and an operator must know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Carries out work on stores; setting `stop` cancels the work."""

    shelves: Shelves
    keys: Keyring
    identity: Identity | None
    stop: threading.Event

    def run(self, work: CopySnapshot | PruneSnapshots | VerifySnapshots | CollectGarbage) -> Did:
        """Carry out the work.

        Raises StoreError, BadInput, and Cancelled if `stop` was set meanwhile.
        """
        match work:
            case CopySnapshot():
                return self._copy(work)
            case PruneSnapshots():
                return self._prune(work)
            case VerifySnapshots():
                return self._verify(work)
            case CollectGarbage():
                return self._collect(work)

    def _heard(self, _: object = None) -> None:
        if self.stop.is_set():
            raise Cancelled("the service was stopped; unfinished work will be repeated")

    def _copy(self, work: CopySnapshot) -> Did:
        source, target = self.shelves.store(work.source), self.shelves.store(work.target)
        moved = copy.copy(source, target, work.id, self._heard)
        return Did(
            text=f"copied {work.id} of {work.name} to {work.target}:"
            f" {show_bytes(moved.bytes_new)} new",
            values={"store": work.target, "from": work.source, **moved.as_json()},
        )

    def _prune(self, work: PruneSnapshots) -> Did:
        store = self.shelves.store(work.store)
        deleted = []
        for id_ in work.ids:
            self._heard()
            try:
                store.delete(id_)
            except (NotInStore, BadInput):  # deleted or pinned meanwhile
                continue
            deleted.append(id_)
        return Did(
            text=f"pruned {work.name} ({work.schedule}) in {work.store}: {len(deleted)} deleted",
            values={"store": work.store, "schedule": work.schedule, "deleted": deleted},
        )

    def _verify(self, work: VerifySnapshots) -> Did:
        store = self.shelves.store(work.store)
        depth = Depth.DEEP if work.depth is Check.DEEP else Depth.SEALED
        there = {one.id for one in store.manifests()}
        ids = [id_ for id_ in work.ids if id_ in there]
        if not ids:  # without IDs, the entire store would be verified
            return Did(text=f"nothing to verify in {work.store}", values={"store": work.store})
        found = verify.prove(
            store, ids, depth, trusted=self.keys.trusted(), identity=self.identity,
            progress=self._heard,
        )  # fmt: skip
        by = controller_identity.asked_by()
        results.write_down(store, found, self.keys.signing(), by=by, at=time.time())
        closed = f", {len(found.closed)} not opened: no matching key" if found.closed else ""
        verified = f"verified {show_count(len(ids), 'snapshot')} in {work.store} ({work.depth})"
        if not found.flaws:
            text = f"{verified}: all intact{closed}"
            return Did(text=text, values=found.as_json())
        first = str(found.flaws[0])
        more = f" (and {len(found.flaws) - 1} more)" if len(found.flaws) > 1 else ""
        text = f"{verified}: {first}{more}"
        return Did(text=text, values=found.as_json(), good=False)

    def _collect(self, work: CollectGarbage) -> Did:
        store = self.shelves.store(work.store)
        done = gc.collect(store, catalog.references, progress=self._heard)
        text = (
            f"collected garbage in {work.store}: {show_bytes(done.removed_bytes)} removed,"
            f" {show_bytes(done.condemned_bytes)} marked for deletion"
        )
        good = not done.missing and not done.unreadable
        if not good:
            text += f"; {show_count(done.missing, 'missing chunk')},"
            text += f" {show_count(len(done.unreadable), 'unreadable pack')}"
        values = {
            "store": work.store, "removed_bytes": done.removed_bytes,
            "condemned_bytes": done.condemned_bytes, "missing_chunks": done.missing,
        }  # fmt: skip
        return Did(text=text, values=values, good=good)
