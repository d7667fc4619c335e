"""Queries of the journal, and lookup of operations by name. Each query is a short transaction."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Float, Select, Table, and_, func, literal, or_, select

from vmckpt.errors import BadInput, meant
from vmckpt.journal import audit_trail, leases, migration_history, row_mapping, schema
from vmckpt.journal.audit_chain import AuditEntry, Verified
from vmckpt.journal.database import Database
from vmckpt.journal.migration_history import PastMove
from vmckpt.journal.records import (
    MAINTENANCE,
    MIGRATE,
    Operation,
    Request,
    StoredEvent,
    StoredForecast,
    StoredSample,
    StoredStep,
)

T = TypeVar("T")


def is_prefix(name: str) -> bool:
    """Return whether a name is long enough to be an ID prefix.

    "m-" alone would match every job of its kind.
    """
    return len(name) > len("m-")


def choose(name: str, found: Sequence[Operation], *, ended: bool = False) -> Operation | None:
    """Return the operation named by an ID, a prefix of an ID, or a guest.

    `found`: candidates whose ID starts with `name` or whose guest has this name. An exact ID takes
    precedence. Returns None if no candidate matches. Raises BadInput if several match, or if the
    guest has no active operation. With `ended`, returns the guest's last operation in that case.
    """
    wanted = name.lower()
    exact = next((one for one in found if one.id == wanted), None)
    if exact is not None:
        return exact
    # For a host's name, an operation on the host takes precedence over the host's maintenance.
    named = [one for one in found if one.guest == name]
    guests = [one for one in named if one.kind != MAINTENANCE] or named
    begun = [one for one in found if one.id.startswith(wanted) and is_prefix(name)]
    meant = {one.id: one for one in [*begun, *(one for one in guests if one.active)]}
    if len(meant) == 1:
        return next(iter(meant.values()))
    if meant:
        latest = sorted(meant.values(), key=lambda one: -one.began_at)
        raise BadInput(f"{name!r} is ambiguous: {_listed(latest)}", hint="use one of these IDs")
    if guests:
        last = max(guests, key=lambda one: one.began_at)
        if ended:
            return last
        raise BadInput(
            f"guest {name} has no active job",
            hint=f"run vmckpt job {last.id} to see the last job ({last.outcome})",
        )
    return None


def unknown(name: str, names: Sequence[str]) -> BadInput:
    """Build the error for a name that matches no job. The hint lists similar names."""
    return BadInput(f"there is no job {name!r}", hint=meant(name, names, "run vmckpt jobs --all"))


def _listed(found: Sequence[Operation], most: int = 4) -> str:
    shown = ", ".join(f"{one.id} ({one.guest})" for one in found[:most])
    return shown if len(found) <= most else f"{shown} and {len(found) - most} more"


_MOST = 100_000
_LIKELY = 200
"""Number of recent operations with which a mistyped name is compared."""
_IN = 500
"""Maximum number of IDs in a query. SQLite accepts at most a thousand parameters."""


class Reader:
    """Reads a journal's database. Every method raises JournalError if the database fails.

    `clock` replaces the database's clock.
    """

    def __init__(self, database: Database, clock: Callable[[], float] | None = None) -> None:
        self._database = database
        self._clock = clock

    def __str__(self) -> str:
        return str(self._database)

    @property
    def shared(self) -> bool:
        """Whether controllers on several machines can share the journal."""
        return self._database.shared

    def now(self) -> float:
        """Return the time by the journal's clock, in seconds since 1970."""
        found: float = self._database.read(lambda c: c.execute(select(self._now())).scalar_one())
        return found

    def _now(self) -> ColumnElement[float]:
        if self._clock is None:
            return self._database.now()
        return literal(self._clock(), Float(53))

    def operation(self, name: str, *, ended: bool = False) -> Operation:
        """Return the operation named by an ID, a prefix of an ID, or a guest. See `choose`.

        Raises BadInput, with similar names, if there is no such operation, and JournalError.
        """
        table = schema.operations
        called = table.c.id == name.lower()
        if is_prefix(name):
            called = table.c.id.startswith(name.lower(), autoescape=True)
        fits = or_(called, table.c.guest == name)
        found = self._read(
            select(table).where(fits).order_by(table.c.began_at.desc()).limit(_MOST),
            row_mapping.operation,
        )
        chosen = choose(name, found, ended=ended)
        if chosen is not None:
            return chosen
        names = {one.id for one in self.operations(limit=_LIKELY)} | {
            one.guest for one in self.operations(active=True, limit=_LIKELY)
        }
        raise unknown(name, sorted(names))

    def operations(
        self, *, active: bool | None = None, limit: int = _MOST, guest: str | None = None
    ) -> list[Operation]:
        """Return operations, the latest first.

        `active`: True: only active operations; False: only ended operations; None: all. `guest`:
        only operations of the guest with this name or UUID.
        """
        table = schema.operations
        chosen = select(table).order_by(table.c.began_at.desc()).limit(limit)
        if guest is not None:
            chosen = chosen.where(or_(table.c.guest == guest, table.c.guest_uuid == guest))
        if active is not None:
            ended = table.c.ended_at
            chosen = chosen.where(ended.is_(None) if active else ended.is_not(None))
        return self._read(chosen, row_mapping.operation)

    def ended(self, since: float) -> list[Operation]:
        """Return operations that ended at `since` or later, sorted by end time."""
        table = schema.operations
        chosen = select(table).where(table.c.ended_at >= since).order_by(table.c.ended_at)
        return self._read(chosen.limit(_MOST), row_mapping.operation)

    def recent(self, guest_uuid: str, since: float) -> list[Operation]:
        """Return operations on a guest that began at `since` or later, the latest first."""
        table = schema.operations
        chosen = select(table).where(table.c.guest_uuid == guest_uuid, table.c.began_at >= since)
        return self._read(chosen.order_by(table.c.began_at.desc()), row_mapping.operation)

    def snapshots(self, guest_uuid: str, limit: int = 50) -> list[Operation]:
        """Return a guest's ended snapshot operations, the latest first."""
        table = schema.operations
        chosen = select(table).where(
            table.c.guest_uuid == guest_uuid,
            table.c.kind == "snapshot",
            table.c.ended_at.is_not(None),
        )
        return self._read(
            chosen.order_by(table.c.ended_at.desc()).limit(limit), row_mapping.operation
        )

    def parts(self, job: str, since: float) -> list[Operation]:
        """Return a job's migrations, sorted by start time. `since`: when the job began."""
        table = schema.operations
        chosen = select(table).where(table.c.kind == MIGRATE, table.c.began_at >= since)
        found = self._read(chosen.order_by(table.c.began_at).limit(_MOST), row_mapping.operation)
        return [one for one in found if one.detail.get("part_of") == job]

    def on_host(self, kinds: Sequence[str], host: str) -> list[Operation]:
        """Return operations of these kinds on a whole host, the latest first."""
        table = schema.operations
        chosen = select(table).where(table.c.kind.in_(kinds), table.c.source == host)
        return self._read(
            chosen.order_by(table.c.began_at.desc()).limit(_MOST), row_mapping.operation
        )

    def holder(self, resource: str) -> Operation | None:
        """Return the active operation that holds a lease; None if no active operation holds it."""
        held = select(schema.leases.c.operation).where(schema.leases.c.resource == resource)
        table = schema.operations
        chosen = select(table).where(table.c.id.in_(held), table.c.ended_at.is_(None))
        return next(iter(self._read(chosen, row_mapping.operation)), None)

    def recent_moves(
        self, source: str, target: str, limit: int = 20, *, guest_uuid: str | None = None
    ) -> list[PastMove]:
        """Return ended migrations from one host to another, the latest first.

        `guest_uuid`: only migrations of this guest; None: of all guests.
        """
        table = schema.operations
        chosen = select(table).where(
            table.c.source == source,
            table.c.target == target,
            table.c.ended_at.is_not(None),
            table.c.report.is_not(None),
        )
        if guest_uuid is not None:
            chosen = chosen.where(table.c.guest_uuid == guest_uuid)
        found = self._read(
            chosen.order_by(table.c.ended_at.desc()).limit(limit), row_mapping.operation
        )
        return [move for one in found if (move := migration_history.past_move(one)) is not None]

    def events(self, id_: str, after: int = 0) -> list[StoredEvent]:
        return self._read(_after(schema.events, id_, after), row_mapping.stored_event)

    def samples(self, id_: str, after: int = 0) -> list[StoredSample]:
        return self._read(_after(schema.samples, id_, after), row_mapping.stored_sample)

    def last_samples(self, ids: Sequence[str]) -> dict[str, StoredSample]:
        """Return the last sample of each operation, by ID. Skips operations without samples."""
        table = schema.samples
        found: dict[str, StoredSample] = {}
        for some in (ids[at : at + _IN] for at in range(0, len(ids), _IN)):
            last = _numbers(table, some).subquery()
            chosen = select(table).join(
                last, and_(table.c.operation == last.c.operation, table.c.seq == last.c.seq)
            )
            found |= dict(
                self._read(chosen, lambda row: (row["operation"], row_mapping.stored_sample(row)))
            )
        return found

    def last_events(self, ids: Sequence[str]) -> dict[str, int]:
        """Return the number of each operation's last event, by ID.

        Skips operations without events.
        """
        table = schema.events
        found: dict[str, int] = {}
        for some in (ids[at : at + _IN] for at in range(0, len(ids), _IN)):
            numbers = _numbers(table, some)
            found |= dict(self._read(numbers, lambda row: (row["operation"], row["seq"])))
        return found

    def forecast(self, id_: str) -> StoredForecast | None:
        """Return the last forecast of an operation; None if the operation has no forecast."""
        return next(
            iter(self._read(_last(schema.forecasts, id_), row_mapping.stored_forecast)), None
        )

    def steps(self, id_: str) -> list[StoredStep]:
        """Return the steps that an operation has taken or intended, in order."""
        return self._read(_after(schema.steps, id_, 0), row_mapping.stored_step)

    def abandoned(self) -> list[Operation]:
        """Return active operations that have lost their controller, the oldest first."""
        now = self.now()
        found = self.operations(active=True)
        return [one for one in reversed(found) if leases.abandoned(one, now)]

    def delegated_to_agents(self) -> list[Operation]:
        """Return active operations that are delegated to agents, the oldest first."""
        found = self.operations(active=True)
        return [one for one in reversed(found) if one.controller.entrusted]

    def audit(
        self, *, guest: str | None = None, since: float | None = None, limit: int = _MOST
    ) -> list[AuditEntry]:
        """Return entries of the audit trail. See `audit_trail.entries`."""
        return audit_trail.entries(self._database, guest=guest, since=since, limit=limit)

    def verify_audit(self, known_head: str | None = None) -> Verified:
        """Verify the audit trail. See `audit_trail.verify`."""
        return audit_trail.verify(self._database, known_head)

    def requests(self, id_: str) -> list[Request]:
        return self._requests(schema.requests.c.operation == id_)

    def request(self, request: int) -> Request:
        return self._requests(schema.requests.c.id == request)[0]

    def _requests(self, *where: Any) -> list[Request]:
        chosen = select(schema.requests).where(*where).order_by(schema.requests.c.id)
        return self._read(chosen, row_mapping.request)

    def _read(self, chosen: Select[Any], made: Callable[[Any], T]) -> list[T]:
        return self._database.read(
            lambda connection: [made(row) for row in connection.execute(chosen).mappings()]
        )


def _after(table: Table, id_: str, after: int) -> Select[Any]:
    chosen = select(table).where(table.c.operation == id_, table.c.seq > after)
    return chosen.order_by(table.c.seq).limit(_MOST)


def _last(table: Table, id_: str) -> Select[Any]:
    return select(table).where(table.c.operation == id_).order_by(table.c.seq.desc()).limit(1)


def _numbers(table: Table, ids: Sequence[str]) -> Select[Any]:
    """Return a query for the number of each operation's last row."""
    return (
        select(table.c.operation, func.max(table.c.seq).label("seq"))
        .where(table.c.operation.in_(ids))
        .group_by(table.c.operation)
    )
