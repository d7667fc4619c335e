"""Create snapshots of guests and of groups."""

import asyncio
from collections.abc import Sequence

from vmckpt.app import fleet, permission, stores
from vmckpt.app.controller import Controller
from vmckpt.journal import jobs
from vmckpt.snapshot import create
from vmckpt.snapshot.group import create as group_create
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.group.create import GroupTaken
from vmckpt.snapshot.request import Taken, TakeRequest


async def take(controller: Controller, store: str | None, request: TakeRequest) -> Taken:
    """Take a snapshot of a guest on the host that has the guest; see snapshot.create.take.

    Raises ReadOnly, InventoryError, and the errors of `fleet.find` and snapshot.create.take.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "snapshot create", guest=request.guest)
    kept_in = inventory.store(store)
    told, _ = await asyncio.gather(fleet.guests(inventory), asyncio.to_thread(jobs.load))
    found = fleet.find(inventory, request.guest, told)
    keys = stores.keyring()
    return await create.take(found, kept_in, keys, request, caller, hosts=inventory.hosts)


async def take_group(
    controller: Controller,
    store: str | None,
    names: Sequence[str],
    request: TakeRequest,
) -> GroupTaken:
    """Create a snapshot of several guests at one instant; see snapshot.group.create.

    The guests may be on different hosts. Raises ReadOnly, BadInput, HostUnreachable, and the errors
    of snapshot.group.create.take.
    """
    inventory, caller = controller.inventory, controller.caller
    permission.require(inventory, "snapshot create")
    told = rules.check_names(names)
    kept_in = inventory.store(store)
    found = await fleet.guests(inventory)
    places = [fleet.find(inventory, name, found) for name in told]
    return await group_create.take(
        places, kept_in, stores.keyring(), request, caller, hosts=inventory.hosts
    )
