"""Open snapshots, and restore guests and groups from them."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from vmckpt.app import permission
from vmckpt.app.controller import Controller
from vmckpt.app.stores import keyring, open_place
from vmckpt.errors import BadInput, GuestLocked, NotInStore, StoreError
from vmckpt.inventory import Inventory
from vmckpt.journal import maintenance
from vmckpt.model.disk import StorePlace
from vmckpt.snapshot import catalog
from vmckpt.snapshot.catalog import Identity
from vmckpt.snapshot.group import restore as group_restore
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.restore import GroupRestored
from vmckpt.snapshot.request import Restored, RestoreRequest
from vmckpt.snapshot.restore import restore as restore_restore
from vmckpt.snapshot.restore.restore import Opened
from vmckpt.store.format import manifest
from vmckpt.store.format.metadata import Public


async def restore(
    controller: Controller,
    store: str | None,
    request: RestoreRequest,
    *,
    on: str | None,
    identity: Identity | None,
    closed_too: bool = False,
) -> Restored:
    """Restore a snapshot; see snapshot.restore.restore.

    `on`: the host; None: the host on which the snapshot was taken. `closed_too`: allow a host in
    maintenance, for a guest that is already there. Raises ReadOnly, NotInStore, StoreError,
    BadInput, InventoryError if the guest's host has two names, Blocked if the host is in
    maintenance, and the errors of snapshot.restore.restore.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, _command(request), guest=request.fork)
    opened = await asyncio.to_thread(opened_anywhere, inventory, store, request.snapshot, identity)
    host = inventory.host(on or opened.public.host)
    if not closed_too:
        await asyncio.to_thread(maintenance.refuse, host.name)
    try:
        return await restore_restore.restore(host, opened, request, caller, hosts=inventory.hosts)
    except GuestLocked:
        # The host that runs the guest may be the same host under another name.
        from vmckpt.app import fleet  # noqa: PLC0415 - loaded only after this error

        await fleet.guests(inventory)
        raise


def _command(request: RestoreRequest) -> str:
    """Return the row of roles.NEEDS for a request.

    Only a fork leaves the guest as it is. A command or a definition that is not checked can run any
    program as root.
    """
    harmless = request.fork and request.on_restore is None and not request.trust_definition
    return "snapshot restore --as" if harmless else "snapshot restore"


def opened_anywhere(
    inventory: Inventory, name: str | None, word: str, identity: Identity | None
) -> Opened:
    """Open a snapshot in the named store, or in the first store that has it if `name` is None.

    If `name` is None, data that the store has lost is read from the other stores. Raises
    NotInStore, StoreError, KeyRefused, BadInput.
    """
    places = list(inventory.stores.values()) or [inventory.store()]
    if name is not None:
        return opened_in(inventory.store(name), word, identity)
    found = catalog.find_anywhere(places, open_place, word)
    opened = opened_in(found.tiers[0].place, found.id, identity)
    # A store that lacks this snapshot may have another snapshot with the same chunks.
    others = tuple(one for one in places if one.name != opened.store.name)
    return replace(opened, others=others)


def opened_in(place_: StorePlace, word: str, identity: Identity | None) -> Opened:
    """Open a snapshot that a trusted writer signed.

    Raises NotInStore, StoreError, KeyRefused, BadInput.
    """
    store = open_place(place_)
    trusted = keyring().trusted()
    id_ = catalog.find(store, word)
    found = manifest.decode(store.manifest(id_), id_, trusted)
    key = catalog.data_key(store, found, identity)
    return Opened(
        store=replace(place_, id=store.id), public=found.public, private=found.private(key),
        data_key=key, trusted=trusted,
    )  # fmt: skip


async def restore_group(
    controller: Controller,
    store: str | None,
    request: RestoreRequest,
    *,
    on: str | None,
    identity: Identity | None,
) -> GroupRestored:
    """Restore a group of snapshots (`request.snapshot` is its ID); see snapshot.group.restore.

    Raises ReadOnly, NotInStore if no store has the complete group, BadInput for options that do not
    apply to groups, Blocked if a host is in maintenance, and the errors of snapshot.group.restore.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, _command(request))
    alone = {
        "--as": request.fork, "--folder": request.folder, "--link": request.link_up,
        "--lazy": request.lazy, "--on-restore": request.on_restore,
    }  # fmt: skip
    said = next((name for name, value in alone.items() if value), None)
    if said is not None:
        raise BadInput(f"{said} is not available for a group, and {request.snapshot} is a group")
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
    """Open all snapshots of a group, and return them."""
    members = _members(inventory, name, id_)
    return [opened_anywhere(inventory, name, one.id, identity) for one in members]


def _members(inventory: Inventory, name: str | None, id_: str) -> Sequence[Public]:
    """Return the members of the group from the first store that has all members.

    Raises NotInStore, StoreError.
    """
    places = [inventory.store(name)] if name else list(inventory.stores.values())
    there = []
    for place in places or [inventory.store()]:
        try:
            told = catalog.readable(open_place(place)).values()
        except StoreError as exc:
            if len(places) < 2:
                raise
            there.append(f"{place.name} cannot be read ({exc.message})")
            continue
        standing = rules.standing(told).get(id_)
        if standing is not None and standing.whole:
            return [one for one in told if one.group == id_]
        if standing is not None:
            there.append(f"{place.name}: {standing}")
    said = "; ".join([f"no store has the complete group {id_}", *there])
    raise NotInStore(said, hint="run vmckpt snapshot list")
