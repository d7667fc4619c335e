"""Where the journal is (a file, or a PostgreSQL that several controllers share); open it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from sqlalchemy import Connection

from vmckpt.errors import JournalError
from vmckpt.journal import schema
from vmckpt.journal.database import Database
from vmckpt.units import Seconds

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
            mend="name a file, or postgresql://user@host/database",
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


def open_database(place: Path | str, *, busy: Seconds, read_only: bool) -> Database:
    """Connect, and make or migrate the tables if they are to be written."""
    found = _connect(place, busy=busy, read_only=read_only)
    try:
        _prepare(found)
    except BaseException:
        found.close()
        raise
    return found


def _connect(place: Path | str, *, busy: Seconds, read_only: bool) -> Database:
    meant = parse(place) if isinstance(place, str) else place
    if isinstance(meant, Path):
        # Each kind costs loading time, and one is needed.
        from vmckpt.journal.sqlite import SqliteDatabase  # noqa: PLC0415

        return SqliteDatabase(meant, busy=busy, read_only=read_only)
    if meant == NONE:
        raise JournalError("no journal is kept", mend="name one in VMCKPT_JOURNAL or --journal")
    from vmckpt.journal.postgresql import PostgresDatabase  # noqa: PLC0415

    return PostgresDatabase(meant, busy=busy, read_only=read_only)


def _prepare(database: Database) -> None:
    found = database.read(schema.version)
    if not schema.refuse_newer(found, str(database)):
        return
    if database.read_only:
        told = "has no tables yet" if found is None else f"has schema {found}, which is an old one"
        raise JournalError(
            f"{database} {told}",
            mend="any command that writes to it, like vmckpt migrate, brings it up to date",
        )
    database.write(lambda connection: _make(database, connection))


def _make(database: Database, connection: Connection) -> None:
    database.alone(connection)
    schema.prepare(connection, str(database))
