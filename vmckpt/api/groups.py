"""The facade's part for snapshots of several guests."""

import asyncio
from collections.abc import Sequence

from vmckpt.api import fleet, snapshots
from vmckpt.errors import BadInput, NotInStore, StoreError
from vmckpt.inventory import Inventory
from vmckpt.journal import maintenance
from vmckpt.model.events import Caller
from vmckpt.snapshot import catalog
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.group import create, rules
from vmckpt.snapshot.group import restore as group_restore
from vmckpt.snapshot.group.create import GroupTaken
from vmckpt.snapshot.group.restore import GroupRestored
from vmckpt.snapshot.request import RestoreRequest, TakeRequest
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.format.metadata import Public


async def take(
    inventory: Inventory,
    store: str | None,
    names: Sequence[str],
    request: TakeRequest,
    caller: Caller,
) -> GroupTaken:
    """Take a snapshot of several guests as one cut, wherever they run; see snapshot.grouping."""
    inventory.may_act()
    told = rules.check_names(names)
    kept_in = inventory.store(store)
    found = await fleet.guests(inventory)
    places = [(snapshots.host_of(inventory, name, found), name) for name in told]
    return await create.take(
        places, kept_in, snapshots.keyring(), request, caller, hosts=inventory.hosts
    )


async def restore(
    inventory: Inventory,
    store: str | None,
    request: RestoreRequest,
    caller: Caller,
    *,
    on: str | None,
    identity: Identity | None,
) -> GroupRestored:
    """Bring a whole group back (`request.snapshot` is its id); see snapshot.restoring_group.

    Raises NotInStore if it is not whole in one store, BadInput.
    """
    inventory.may_act()
    alone = {
        "--as": request.fork, "--folder": request.folder, "--link": request.link_up,
        "--lazy": request.lazy, "--on-restore": request.on_restore,
    }  # fmt: skip
    said = next((name for name, value in alone.items() if value), None)
    if said is not None:
        raise BadInput(f"{said} is for one guest, and {request.snapshot} is a group")
    opened = await asyncio.to_thread(_opened, inventory, store, request.snapshot, identity)
    members = [(inventory.host(on or one.public.host), one) for one in opened]
    for host in {one.name for one, _ in members}:
        await asyncio.to_thread(maintenance.refuse, host)
    return await group_restore.restore(
        request.snapshot, members, request, caller, hosts=inventory.hosts
    )


def _opened(
    inventory: Inventory, name: str | None, id_: str, identity: Identity | None
) -> list[Opened]:
    """All snapshots of a group."""
    members = _members(inventory, name, id_)
    return [snapshots.opened_anywhere(inventory, name, one.id, identity) for one in members]


def _members(inventory: Inventory, name: str | None, id_: str) -> Sequence[Public]:
    """Those of the first store that has the group whole. Raises NotInStore, StoreError."""
    places = [inventory.store(name)] if name else list(inventory.stores.values())
    there = []
    for place in places or [inventory.store()]:
        try:
            told = catalog.readable(snapshots.open_place(place)).values()
        except StoreError as exc:
            if len(places) < 2:
                raise
            there.append(f"{place.name} does not answer ({exc.message})")
            continue
        standing = rules.standing(told).get(id_)
        if standing is not None and standing.whole:
            return [one for one in told if one.group == id_]
        if standing is not None:
            there.append(f"{place.name}: {standing}")
    said = "; ".join([f"no store has a whole group {id_}", *there])
    raise NotInStore(said, mend="vmckpt snapshot list shows what is there")
