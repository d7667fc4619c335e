"""The journal's tables, for SQLite and PostgreSQL, and migrations from older schema versions."""

from collections.abc import Callable, Sequence

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    update,
)

from vmckpt.errors import JournalError

metadata = MetaData()

meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

operations = Table(
    "operations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("guest", Text, nullable=False),
    Column("guest_uuid", Text),
    Column("source", Text),
    Column("target", Text),
    Column("policy", Text),
    Column("mode", Text),
    Column("state", Text, nullable=False),
    Column("phase", Text),
    Column("outcome", Text),
    Column("asked_by", Text, nullable=False),
    Column("asked_from", Text),
    Column("controller_host", Text, nullable=False),
    Column("controller_boot", Text, nullable=False),
    Column("controller_pid", Integer, nullable=False),
    Column("controller_started", BigInteger, nullable=False),
    Column("began_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    # The retention step to which the operation's samples have been thinned
    Column("thinned", Integer, nullable=False),
    Column("detail", JSON(none_as_null=True), nullable=False),
    Column("report", JSON(none_as_null=True)),
    # When the controller's last heartbeat expires
    Column("alive_until", Float(53)),
    Index("operations_by_end", "ended_at", "thinned"),
    Index("operations_by_beginning", "began_at"),
    Index("operations_by_guest", "guest"),
    Index("operations_by_uuid", "guest_uuid", "began_at"),
    Index("operations_by_hosts", "source", "target", "ended_at"),
)


def _owner(*, key: bool) -> Column[str]:
    owner = ForeignKey(operations.c.id, ondelete="CASCADE")
    return Column("operation", Text, owner, primary_key=key, nullable=False)


def _number() -> Column[int]:
    return Column("seq", Integer, primary_key=True, autoincrement=False)


events = Table(
    "events",
    metadata,
    _owner(key=True),
    _number(),
    Column("at", Float(53), nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", JSON, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    _owner(key=True),
    _number(),
    Column("at", Float(53), nullable=False),
    Column("data", JSON, nullable=False),
)

forecasts = Table(
    "forecasts",
    metadata,
    _owner(key=True),
    _number(),
    Column("made_at", Float(53), nullable=False),
    Column("data", JSON, nullable=False),
)

requests = Table(
    "requests",
    metadata,
    Column("id", Integer, primary_key=True),
    _owner(key=False),
    Column("kind", Text, nullable=False),
    Column("arguments", JSON, nullable=False),
    Column("asked_by", Text, nullable=False),
    Column("asked_at", Float(53), nullable=False),
    Column("taken_at", Float(53)),
    Column("answered_at", Float(53)),
    Column("ok", Boolean),
    Column("answer", Text),
    Index("requests_by_operation", "operation", "answered_at"),
)

steps = Table(
    "steps",
    metadata,
    _owner(key=True),
    _number(),
    Column("name", Text, nullable=False),
    Column("intent", JSON, nullable=False),
    Column("state", Text, nullable=False),
    Column("result", JSON(none_as_null=True)),
    Column("began_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
)

leases = Table(
    "leases",
    metadata,
    Column("resource", Text, primary_key=True),
    # Never decreases: a released lease keeps its row
    Column("token", BigInteger, nullable=False),
    # The holder; null: the lease is free
    Column("operation", Text, ForeignKey(operations.c.id, ondelete="SET NULL")),
    Column("taken_at", Float(53)),
    Index("leases_by_operation", "operation"),
)

# Hash-chained (see `audit_chain`). It refers to no operation, so pruning keeps its rows.
audit = Table(
    "audit",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("uid", BigInteger, nullable=False),
    Column("user", Text, nullable=False),
    Column("sudo_user", Text),
    Column("command", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("what", Text, nullable=False),
    Column("job", Text),
    Column("kind", Text),
    Column("guest", Text),
    Column("source", Text),
    Column("target", Text),
    Column("step", Text),
    Column("outcome", Text),
    Column("previous", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Index("audit_by_guest", "guest"),
    Index("audit_by_time", "at_ms"),
)

AUDIT_HEAD = "audit_head"
"""Key in `meta` for the last number and digest in `audit`. Writers lock this row."""

PRUNED_AT = "pruned_at"
"""Key in `meta` for the time of the last pruning. The row always exists."""

# Migrations are plain SQL, because the tables above may change later but migrations must not.
_SECOND = (
    "ALTER TABLE operations ADD COLUMN alive_until FLOAT",
    """CREATE TABLE steps (
        operation TEXT NOT NULL,
        seq INTEGER NOT NULL,
        name TEXT NOT NULL,
        intent JSON NOT NULL,
        state TEXT NOT NULL,
        result JSON,
        began_at FLOAT NOT NULL,
        ended_at FLOAT,
        PRIMARY KEY (operation, seq),
        FOREIGN KEY (operation) REFERENCES operations (id) ON DELETE CASCADE
    )""",
    """CREATE TABLE leases (
        resource TEXT NOT NULL PRIMARY KEY,
        token BIGINT NOT NULL,
        operation TEXT,
        taken_at FLOAT,
        FOREIGN KEY (operation) REFERENCES operations (id) ON DELETE SET NULL
    )""",
    "CREATE INDEX leases_by_operation ON leases (operation)",
    # Each active operation gets the lease on its guest. If a guest has several active operations,
    # the latest operation gets the lease.
    """INSERT INTO leases SELECT 'guest/' || guest_uuid, 1, id, began_at FROM operations one
        WHERE ended_at IS NULL AND guest_uuid IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM operations other
            WHERE other.guest_uuid = one.guest_uuid AND other.ended_at IS NULL
            AND (other.began_at, other.id) > (one.began_at, one.id))""",
    """INSERT INTO meta SELECT 'pruned_at', '0'
        WHERE NOT EXISTS (SELECT 1 FROM meta WHERE "key" = 'pruned_at')""",
)


def _second(connection: Connection) -> None:
    """Migrate to version 2: add leases, heartbeats and steps."""
    for statement in _SECOND:
        connection.exec_driver_sql(statement)


_THIRD = (
    """CREATE TABLE audit (
        seq BIGINT NOT NULL PRIMARY KEY,
        at_ms BIGINT NOT NULL,
        uid BIGINT NOT NULL,
        "user" TEXT NOT NULL,
        sudo_user TEXT,
        command TEXT NOT NULL,
        host TEXT NOT NULL,
        what TEXT NOT NULL,
        job TEXT,
        kind TEXT,
        guest TEXT,
        source TEXT,
        target TEXT,
        step TEXT,
        outcome TEXT,
        previous TEXT NOT NULL,
        digest TEXT NOT NULL
    )""",
    "CREATE INDEX audit_by_guest ON audit (guest)",
    "CREATE INDEX audit_by_time ON audit (at_ms)",
    """INSERT INTO meta SELECT 'audit_head', '0'
        WHERE NOT EXISTS (SELECT 1 FROM meta WHERE "key" = 'audit_head')""",
)


def _third(connection: Connection) -> None:
    """Migrate to version 3: add the audit trail, which begins empty."""
    for statement in _THIRD:
        connection.exec_driver_sql(statement)


MIGRATIONS: Sequence[Callable[[Connection], None]] = (_second, _third)
"""Functions that migrate the tables: the first migrates version 1 to version 2, and so on."""


def version(connection: Connection) -> int | None:
    """Return the schema version of the existing tables; None if there are no tables."""
    if not inspect(connection).has_table(meta.name):
        return None
    found = connection.execute(select(meta.c.value).where(meta.c.key == "version")).scalar()
    return None if found is None else int(found)


def refuse_newer(found: int | None, where: str) -> bool:
    """Return whether the tables must be created or migrated.

    `found`: the schema version of the tables. `where`: the journal, for messages. Raises
    JournalError if the version is too new.
    """
    known = 1 + len(MIGRATIONS)
    if found is not None and found > known:
        raise JournalError(
            f"{where} has schema version {found}, but this vmckpt supports versions up to {known}",
            hint="use the newer vmckpt that created the journal, or set VMCKPT_JOURNAL to another"
            " journal",
        )
    return found != known


def prepare(connection: Connection, where: str) -> None:
    """Create or migrate the tables, in the current transaction.

    Raises JournalError if the schema version is too new.
    """
    found = version(connection)
    if not refuse_newer(found, where):  # another process has already created or migrated them
        return
    if found is None:
        metadata.create_all(connection)
        known = str(1 + len(MIGRATIONS))
        first = {"version": known, PRUNED_AT: "0", AUDIT_HEAD: "0"}
        rows = [{"key": key, "value": value} for key, value in first.items()]
        connection.execute(insert(meta), rows)
        return
    for number, migrate in enumerate(MIGRATIONS[found - 1 :], start=found + 1):
        migrate(connection)
        connection.execute(update(meta).where(meta.c.key == "version").values(value=str(number)))
