"""Where the journal is: a file, or a PostgreSQL database that several controllers share."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from vmckpt.errors import JournalError

VARIABLE = "VMCKPT_JOURNAL"
NONE = "none"
"""Chosen instead of a journal: nothing is recorded, and nobody else is kept away."""
_SCHEME = "postgresql"
_PASSWORD = re.compile(r"(?:^|[?&\s])(?:ssl)?password=")


def state_folder(environ: Mapping[str, str], *, root: bool) -> Path:
    """VMCKPT_STATE, else /var/lib/vmckpt for root, else the user's state folder."""
    if named := environ.get("VMCKPT_STATE"):
        return Path(named)
    if root:
        return Path("/var/lib/vmckpt")
    # The XDG specification says that a relative path is no path.
    state = Path(environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "vmckpt"


def chosen(environ: Mapping[str, str], *, root: bool) -> Path | str:
    """VMCKPT_JOURNAL (a URL, a path, or "none"), else a file in the state folder."""
    if named := environ.get(VARIABLE):
        return parse(named)
    return state_folder(environ, root=root) / "journal.db"


def parse(text: str) -> Path | str:
    """A place as somebody wrote it. Raises JournalError if it is a URL of another kind."""
    if text == NONE:
        return NONE
    scheme, found, _ = text.partition("://")
    if not found:
        return Path(text)
    if scheme != _SCHEME:
        raise JournalError(
            f"a journal at {scheme}:// is not known",
            hint="name a file, or postgresql://user@host/database",
        )
    return text


def has_password(text: str) -> bool:
    """Whether a place has a password in it, also where it is written in a wrong way. Pure."""
    _, found, rest = text.partition("://")
    login, at, _ = rest.partition("?")[0].rpartition("@")
    return bool(found and at and ":" in login) or _PASSWORD.search(text) is not None


def choose(text: str) -> None:
    """Use that place in this process and what it starts. Raises JournalError as `parse`."""
    parse(text)
    os.environ[VARIABLE] = text


def default() -> Path | str:
    """The journal of whoever runs this."""
    return chosen(os.environ, root=os.geteuid() == 0)


def there(meant: Path | str) -> bool:
    """Whether there is anything to read; of a database only asking it tells."""
    return meant.exists() if isinstance(meant, Path) else meant != NONE
