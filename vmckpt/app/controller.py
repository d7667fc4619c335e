"""What every application service takes: the inventory, the policies and the caller.

The services, one module for each capability, take a `Controller`, report by a stream of events
(`model.events`) and return frozen data. A front end loads only the services that it uses.
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
    """What a command acts with: the hosts and stores it knows, its policies, and its listener."""

    inventory: Inventory
    policies: "Sequence[Policy]" = ()
    """Empty where no policy decides anything."""
    caller: Caller


def load_inventory(explicit: Path | None = None) -> Inventory:
    """`explicit`, else VMCKPT_INVENTORY, else ./hosts.yaml, else the running lab's."""
    path = inventory_path(explicit)
    if path is None:
        raise InventoryError(
            "no inventory: no --inventory, no VMCKPT_INVENTORY, no ./hosts.yaml, no running lab",
            hint="write a hosts.yaml (see README) or run vmckpt lab up",
        )
    return inventories.load(path)


def inventory_path(explicit: Path | None = None) -> Path | None:
    """Where `load_inventory` finds it; None if there is none."""
    if (found := inventories.find(explicit)) is not None:
        return found
    from vmckpt.util import plugins  # noqa: PLC0415 - reads what is installed, which takes a while

    others = (find() for _, find in plugins.added("vmckpt.inventories"))
    return next((path for path in others if path is not None), None)
