"""Pin a snapshot while servers need its data, so that it is not deleted.

The reasons of several servers are kept in one pin. A pin that an operator set is left alone.
"""

from collections.abc import Collection
from contextlib import suppress

from vmckpt.errors import StoreError
from vmckpt.store.repository import Store

READS = "still needs data from this snapshot on"
"""The words by which the pin of a server is recognised."""
READS_DISKS, READS_OLD = "still reads its disks from this snapshot on", "come in from it on"
"""The words of pins that earlier versions stored."""


def pin(store: Store, snapshot: str, why: str, earlier: Collection[str] = ()) -> None:
    """Pin a snapshot for a server. `earlier`: reasons that mean the same. Raises StoreError."""
    known = store.pin_reason(snapshot)
    if known is None:
        store.pin(snapshot, why)
    elif any(one in known for one in (READS, READS_DISKS, READS_OLD)) and not (
        {why, *earlier} & set(known.split("; "))
    ):
        store.pin(snapshot, f"{known}; {why}")


def unpin(store: Store, snapshot: str, whys: Collection[str]) -> None:
    """Remove a server's reasons from the pin. Does nothing if the store does not answer."""
    with suppress(StoreError):
        known = (store.pin_reason(snapshot) or "").split("; ")
        rest = [one for one in known if one not in whys]
        if len(rest) < len(known):
            store.pin(snapshot, "; ".join(rest)) if rest else store.unpin(snapshot)
