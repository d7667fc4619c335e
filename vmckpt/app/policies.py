"""Policies as the operator names them: the shelf's, or a file."""

from pathlib import Path

from vmckpt.inventory import Inventory
from vmckpt.policy import loader, select
from vmckpt.policy.loader import Shelf
from vmckpt.policy.model import Policy


def load_policies(
    inventory: Inventory, folder: Path | None = None, wanted: str | None = None
) -> tuple[tuple[Policy, ...], str | None]:
    """All policies, and the name of the wanted one, which may be a file beside them.

    Raises PolicyError.
    """
    place = loader.folder(folder, inventory.path)
    if wanted is not None and loader.is_path(wanted):
        chosen = loader.load_file(Path(wanted))
        return (chosen,), chosen.name
    found = loader.load_all(place)
    if wanted is not None:
        select.by_name(found, wanted)
    return found, wanted


def survey_policies(inventory: Inventory, folder: Path | None = None) -> Shelf:
    """Those that can be read, and what is wrong with the others: going on with a broken move must
    not wait for a typing error."""
    return loader.survey(loader.folder(folder, inventory.path))
