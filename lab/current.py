"""Find the inventory of the running lab, which is the default for all commands."""

import os
from collections.abc import Mapping
from pathlib import Path

from vmckpt.errors import BadInput
from vmckpt_lab.plan import LABS

VARIABLE = "VMCKPT_LAB"
"""Environment variable with the name of the lab to use."""


def inventory(environment: Mapping[str, str] = os.environ, labs: Path = Path(LABS)) -> Path | None:
    """Return the path of the running lab's hosts.yaml, or None if no lab is running.

    `environment`: VMCKPT_LAB selects a lab. `labs`: the directory of running labs. Raises BadInput
    if several labs are running and none is selected, or if only other labs are running.
    """
    found = {path.parent.name: path for path in sorted(labs.glob("*/hosts.yaml"))}
    names = ", ".join(found)
    if (wanted := environment.get(VARIABLE)) and found:
        if wanted not in found:
            raise BadInput(
                f"{VARIABLE} is {wanted}, but no such lab is running; running: {names}",
                hint=f"set {VARIABLE} to a lab that is running, or unset it",
            )
        return found[wanted]
    if len(found) > 1:
        raise BadInput(
            f"several labs are running ({names})",
            hint=f"select one with {VARIABLE}, like {VARIABLE}={next(iter(found))}, or with"
            " --inventory",
        )
    return next(iter(found.values()), None)
