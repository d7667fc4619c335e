"""Open the database that a location means, with tables of the right version."""

from pathlib import Path

from sqlalchemy import Connection

from vmckpt.errors import JournalError
from vmckpt.journal import location, schema
from vmckpt.journal.database import Database
from vmckpt.units import Seconds


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
    meant = location.parse(place) if isinstance(place, str) else place
    if isinstance(meant, Path):
        # Each kind costs loading time, and one is needed.
        from vmckpt.journal.sqlite import SqliteDatabase  # noqa: PLC0415

        return SqliteDatabase(meant, busy=busy, read_only=read_only)
    if meant == location.NONE:
        raise JournalError("no journal is kept", hint="name one in VMCKPT_JOURNAL or --journal")
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
            hint="any command that writes to it, like vmckpt migrate, brings it up to date",
        )
    database.write(lambda connection: _make(database, connection))


def _make(database: Database, connection: Connection) -> None:
    database.alone(connection)
    schema.prepare(connection, str(database))
