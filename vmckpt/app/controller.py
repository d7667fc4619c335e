"""The context of every application service: the inventory, the policies and the caller.

Each service is a module for one capability. It takes a `Controller`, reports progress as events
(`model.events`) and returns frozen data. A front end loads only the services that it uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt import inventory as inventories
from vmckpt.errors import InventoryError
from vmckpt.inventory import Inventory
from vmckpt.model.events import Caller

if TYPE_CHECKING:
    from vmckpt.policy.model import Policy

__all__ = ["Caller", "Controller", "Inventory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """The context of a command: its hosts and stores, its policies, and its caller."""

    inventory: Inventory
    policies: "Sequence[Policy]" = ()
    """The policies; empty for commands that no policy affects."""
    caller: Caller


def load_inventory(explicit: Path | None = None) -> Inventory:
    """Load the inventory: `explicit`, or else the file that VMCKPT_INVENTORY names, ./hosts.yaml,
    or the inventory of the running lab.

    A file that is named explicitly or by VMCKPT_INVENTORY must exist. Raises InventoryError if
    there is no inventory, or if the inventory cannot be read or is invalid, and NotPermitted if the
    inventory gives the user no role.
    """
    path = inventory_path(explicit)
    if path is None:
        raise InventoryError(
            "no inventory: no --inventory, no VMCKPT_INVENTORY, no ./hosts.yaml, no running lab",
            hint="write a hosts.yaml (see README) or run vmckpt lab up",
        )
    found = inventories.load(path)
    if found.roles is not None:
        from vmckpt.app import permission  # noqa: PLC0415 - only inventories with roles need it

        permission.require_view(found)
    return found


def inventory_path(explicit: Path | None = None) -> Path | None:
    """Return the path that `load_inventory` reads, or None if there is no inventory."""
    if (found := inventories.find(explicit)) is not None:
        return found
    from vmckpt.util import plugins  # noqa: PLC0415 - listing installed packages takes a while

    others = (find() for _, find in plugins.added("vmckpt.inventories"))
    return next((path for path in others if path is not None), None)
