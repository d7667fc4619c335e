"""Open the database at a location, and create or migrate its tables."""

from pathlib import Path

from sqlalchemy import Connection

from vmckpt.errors import JournalError
from vmckpt.journal import location, schema
from vmckpt.journal.database import Database
from vmckpt.units import Seconds


def open_database(place: Path | str, *, busy: Seconds, read_only: bool) -> Database:
    """Open a journal's database, and create or migrate its tables unless `read_only`.

    `busy`: maximum wait, in seconds, for other writers. Raises JournalError, ReadOnly.
    """
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
        # Each database module is imported only when needed, because importing takes time.
        from vmckpt.journal.sqlite import SqliteDatabase  # noqa: PLC0415

        return SqliteDatabase(meant, busy=busy, read_only=read_only)
    if meant == location.NONE:
        raise JournalError("the journal is turned off", hint="set VMCKPT_JOURNAL or --journal")
    from vmckpt.journal.postgresql import PostgresDatabase  # noqa: PLC0415

    return PostgresDatabase(meant, busy=busy, read_only=read_only)


def _prepare(database: Database) -> None:
    found = database.read(schema.version)
    if not schema.refuse_newer(found, str(database)):
        return
    if database.read_only:
        told = "has no tables yet" if found is None else f"has the old schema version {found}"
        raise JournalError(
            f"{database} {told}",
            hint="run a command that writes to the journal, such as vmckpt migrate, to update the"
            " schema",
        )
    database.write(lambda connection: _make(database, connection))


def _make(database: Database, connection: Connection) -> None:
    database.alone(connection)
    schema.prepare(connection, str(database))
