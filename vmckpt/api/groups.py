"""The facade's part for snapshots of several guests."""

from collections.abc import Sequence

from vmckpt import api
from vmckpt.api import snapshots
from vmckpt.inventory import Inventory
from vmckpt.model.callers import Caller
from vmckpt.snapshot import group, grouping
from vmckpt.snapshot.grouping import GroupTaken
from vmckpt.snapshot.requests import TakeRequest


async def take(
    inventory: Inventory,
    store: str | None,
    names: Sequence[str],
    request: TakeRequest,
    caller: Caller,
) -> GroupTaken:
    """Take a snapshot of several guests as one cut, wherever they run; see snapshot.grouping."""
    inventory.may_act()
    told = group.check_names(names)
    kept_in = inventory.store(store)
    found = await api.guests(inventory)
    places = [(snapshots.host_of(inventory, name, found), name) for name in told]
    return await grouping.take(
        places, kept_in, snapshots.keyring(), request, caller, hosts=inventory.hosts
    )
