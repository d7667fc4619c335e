"""Find the inventory of the running lab, which is the default for all commands."""

from pathlib import Path

from vmckpt.errors import BadInput
from vmckpt_lab.plan import LABS


def inventory() -> Path | None:
    """Return the path of the running lab's hosts.yaml, or None if no lab is running.

    Raises BadInput if several labs are running.
    """
    found = sorted(LABS.glob("*/hosts.yaml"))
    if len(found) > 1:
        names_ = ", ".join(path.parent.name for path in found)
        raise BadInput(
            f"several labs are running ({names_})",
            hint=f"select one with --inventory or VMCKPT_INVENTORY, like {LABS}/NAME/hosts.yaml",
        )
    return found[0] if found else None
