"""Load policies from the inventory's policy directory, or from a file that the operator names."""

from pathlib import Path

from vmckpt.inventory import Inventory
from vmckpt.policy import loader, select
from vmckpt.policy.loader import Shelf
from vmckpt.policy.model import Policy


def load_policies(
    inventory: Inventory, folder: Path | None = None, wanted: str | None = None
) -> tuple[tuple[Policy, ...], str | None]:
    """Load the policies, and resolve the wanted policy, which may be a name or a file.

    Returns the policies, and the name of the wanted policy or None. If `wanted` is a file, only the
    policy in that file is returned. Raises PolicyError.
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
    """Load all valid policies, and collect the errors of the other policies.

    It must be possible to resume a broken migration even if a policy contains a syntax error.
    """
    return loader.survey(loader.folder(folder, inventory.path))
