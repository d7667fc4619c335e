"""The facade's part for making guests ready."""

import asyncio
from dataclasses import replace

from vmckpt.api import fleet, snapshots
from vmckpt.inventory import Inventory
from vmckpt.lease import replicas
from vmckpt.model.events import Caller
from vmckpt.snapshot import prepare
from vmckpt.snapshot.prepare import Readiness


async def look(inventory: Inventory, guest: str) -> Readiness:
    """What a guest lacks, wherever it is; see snapshot.preparing."""
    host = snapshots.host_of(inventory, guest, await fleet.guests(inventory))
    return await _with_lease_store(inventory, await prepare.look(host, guest))


async def make_ready(inventory: Inventory, guest: str, caller: Caller) -> Readiness:
    """Change what is stored of it; see snapshot.preparing."""
    inventory.may_act()
    host = snapshots.host_of(inventory, guest, await fleet.guests(inventory))
    return await _with_lease_store(inventory, await prepare.make_ready(host, guest, caller))


async def _with_lease_store(inventory: Inventory, found: Readiness) -> Readiness:
    """A guest is ready for replication only if what decides a failover is."""
    if inventory.lease is None:
        return found
    seen = await asyncio.to_thread(replicas.look, inventory.lease)
    return replace(found, findings=(*found.findings, seen))
