"""The journal's location: a file, or a PostgreSQL database that several controllers share."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from vmckpt.errors import JournalError

VARIABLE = "VMCKPT_JOURNAL"
NONE = "none"
"""Turns the journal off: nothing is recorded, and other controllers are not locked out."""
_SCHEME = "postgresql"
_PASSWORD = re.compile(r"(?:^|[?&\s])(?:ssl)?password=")


def state_folder(environ: Mapping[str, str], *, root: bool) -> Path:
    """Return the state directory: VMCKPT_STATE if set, or else the user's default.

    The default is /var/lib/vmckpt for root, and the directory vmckpt in XDG_STATE_HOME or
    ~/.local/state for other users.
    """
    if named := environ.get("VMCKPT_STATE"):
        return Path(named)
    if root:
        return Path("/var/lib/vmckpt")
    # The XDG specification requires relative paths to be ignored.
    state = Path(environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local/state") / "vmckpt"


def chosen(environ: Mapping[str, str], *, root: bool) -> Path | str:
    """Return VMCKPT_JOURNAL (a URL, a path, or "none"), or else journal.db in the state directory.

    Raises JournalError in the same cases as `parse`.
    """
    if named := environ.get(VARIABLE):
        return parse(named)
    return state_folder(environ, root=root) / "journal.db"


def parse(text: str) -> Path | str:
    """Parse a location: a path, a URL, or "none". Raises JournalError for an unsupported URL."""
    if text == NONE:
        return NONE
    scheme, found, _ = text.partition("://")
    if not found:
        return Path(text)
    if scheme != _SCHEME:
        raise JournalError(
            f"{scheme}:// URLs are not supported for a journal",
            hint="use a file, or postgresql://user@host/database",
        )
    return text


def has_password(text: str) -> bool:
    """Return whether a location contains a password, even if it is an invalid URL. Pure."""
    _, found, rest = text.partition("://")
    login, at, _ = rest.partition("?")[0].rpartition("@")
    return bool(found and at and ":" in login) or _PASSWORD.search(text) is not None


def choose(text: str) -> None:
    """Set the location for this process and its children.

    Raises JournalError in the same cases as `parse`.
    """
    parse(text)
    os.environ[VARIABLE] = text


def default() -> Path | str:
    """Return the location of the current user's journal.

    Raises JournalError in the same cases as `parse`.
    """
    return chosen(os.environ, root=os.geteuid() == 0)


def there(meant: Path | str) -> bool:
    """Return whether a journal may exist: the file exists, or the location is a URL."""
    return meant.exists() if isinstance(meant, Path) else meant != NONE
