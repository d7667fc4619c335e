"""The inventory of the lab that runs, for commands that are told no other."""

from pathlib import Path

from vmckpt.errors import BadInput
from vmckpt_lab.plan import LABS


def inventory() -> Path | None:
    """hosts.yaml of the one running lab; None if none runs; BadInput if several do."""
    found = sorted(LABS.glob("*/hosts.yaml"))
    if len(found) > 1:
        names_ = ", ".join(path.parent.name for path in found)
        raise BadInput(
            f"several labs are up ({names_})",
            hint=f"choose with --inventory or VMCKPT_INVENTORY, like {LABS}/NAME/hosts.yaml",
        )
    return found[0] if found else None
