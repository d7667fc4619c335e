"""Where the journal is."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_folder(environ: Mapping[str, str], *, root: bool) -> Path:
    """VMCKPT_STATE, else /var/lib/vmckpt for root, else the user's state folder."""
    if named := environ.get("VMCKPT_STATE"):
        return Path(named)
    if root:
        return Path("/var/lib/vmckpt")
    # The XDG specification says that a relative path is no path.
    state = Path(environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "vmckpt"


def journal_file() -> Path:
    """The journal of whoever runs this."""
    return state_folder(os.environ, root=os.geteuid() == 0) / "journal.db"
