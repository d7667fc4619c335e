"""Append to the audit trail in the journal, and read it. `audit_chain` computes and verifies it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, insert, select, update

from vmckpt.journal import audit_chain, schema
from vmckpt.journal.audit_chain import (
    Actor,
    AuditEntry,
    AuditFact,
    Broken,
    Deed,
    Head,
    Verified,
    What,
)
from vmckpt.journal.database import Database

_ACTOR = ("uid", "user", "sudo_user", "command", "host")
_DEED = ("what", "job", "kind", "guest", "source", "target", "step", "outcome")
_JOB = ("kind", "guest", "source", "target")
_PAGE = 10_000
"""Number of entries that are read in one transaction."""


def append(
    connection: Connection,
    database: Database,
    actor: Actor,
    deed: Deed,
    now: ColumnElement[float],
) -> AuditEntry:
    """Append an entry to the audit trail, in the current transaction. Returns the entry.

    Locks the trail until the transaction ends, so that two writers cannot append the same number.
    Must be the transaction's last statement: a transaction that holds this lock must not wait for
    another lock. A damaged trail does not make this fail; `audit_chain.verify` finds the damage.
    """
    stored, at = _locked_head(connection, database, now)
    entry = audit_chain.following(
        _latest(stored, _last_row(connection)),
        AuditFact(at_ms=round(at * 1000), actor=actor, deed=deed),
    )
    connection.execute(insert(schema.audit).values(**_row(entry)))
    connection.execute(
        update(schema.meta)
        .where(schema.meta.c.key == schema.AUDIT_HEAD)
        .values(value=f"{entry.seq} {entry.digest}")
    )
    return entry


def _locked_head(
    connection: Connection, database: Database, now: ColumnElement[float]
) -> tuple[Head | None, float]:
    """Lock the record of the head. Returns the head and the time."""
    table = schema.meta
    chosen = select(table.c.value, now.label("now")).where(table.c.key == schema.AUDIT_HEAD)
    chosen = chosen.with_for_update()  # no effect in SQLite, see `sqlite`
    found = connection.execute(chosen).first()
    if found is None:  # the row was removed by hand
        connection.execute(database.insert_new(table).values(key=schema.AUDIT_HEAD, value="0"))
        found = connection.execute(chosen).one()
    return parse_head(found.value), float(found.now)


def _last_row(connection: Connection) -> Head | None:
    table = schema.audit
    chosen = select(table.c.seq, table.c.digest).order_by(table.c.seq.desc()).limit(1)
    found = connection.execute(chosen).first()
    if found is None or not isinstance(found.seq, int) or not isinstance(found.digest, str):
        return None
    return Head(seq=found.seq, digest=found.digest)


def _latest(stored: Head | None, row: Head | None) -> Head | None:
    """Return the head to append to: an unused number, even if one of the two was edited.

    If they differ, the trail was edited. The recorded head is preferred, because the next entry
    then shows it.
    """
    if stored is None or row is None:
        return stored or row
    return row if row.seq > stored.seq else stored


def parse_head(text: str | None) -> Head | None:
    """Parse the record of the head; None: there is no entry, or the record is invalid."""
    number, _, digest = (text or "").partition(" ")
    return Head(seq=int(number), digest=digest) if number.isdecimal() and digest else None


def about_job(connection: Connection, id_: str, what: What, **more: Any) -> Deed:
    """Return the entry for something that happened to a job, with the job's guest and hosts."""
    table = schema.operations
    chosen = select(*(table.c[name] for name in _JOB)).where(table.c.id == id_)
    found = connection.execute(chosen).mappings().one()
    return Deed(what=what, job=id_, **found, **more)


def _row(entry: AuditEntry) -> dict[str, Any]:
    fact = entry.fact
    return {
        "seq": entry.seq,
        "at_ms": fact.at_ms,
        **{name: getattr(fact.actor, name) for name in _ACTOR},
        **{name: getattr(fact.deed, name) for name in _DEED},
        "previous": entry.previous,
        "digest": entry.digest,
    }


def entries(
    database: Database, *, guest: str | None, since: float | None, limit: int
) -> list[AuditEntry]:
    """Return the last `limit` entries, the oldest first.

    `guest`: only entries of the guest or host with this name. `since`: only entries from this time
    on, in seconds since 1970.
    """
    table = schema.audit
    chosen = select(table).order_by(table.c.seq.desc()).limit(limit)
    if guest is not None:
        chosen = chosen.where(table.c.guest == guest)
    if since is not None:
        chosen = chosen.where(table.c.at_ms >= round(since * 1000))
    return _read(database, chosen)[::-1]


def verify(database: Database, known_head: str | None) -> Verified:
    """Verify the complete trail. See `audit_chain.verify`.

    `known_head`: the head that the operator noted earlier, if any. Entries that are appended in the
    meantime are verified in part. Raises JournalError.
    """
    recorded, valid = database.read(_recorded)
    found = audit_chain.verify(_all(database), known_head, recorded)
    if found.broken is None and not valid:
        why = "the journal's record of the head is missing or invalid"
        return replace(found, broken=Broken(seq=found.entries + 1, why=why))
    return found


def _recorded(connection: Connection) -> tuple[Head | None, bool]:
    """Return the recorded head, and whether the record is valid."""
    chosen = select(schema.meta.c.value).where(schema.meta.c.key == schema.AUDIT_HEAD)
    text = connection.execute(chosen).scalar()
    head = parse_head(text)
    empty = text == "0" and _last_row(connection) is None
    return head, head is not None or empty


def _all(database: Database) -> Iterator[AuditEntry]:
    table = schema.audit
    chosen = select(table).order_by(table.c.seq).limit(_PAGE)
    page = _read(database, chosen)
    while page:
        yield from page
        page = _read(database, chosen.where(table.c.seq > page[-1].seq))


def _read(database: Database, chosen: Select[Any]) -> list[AuditEntry]:
    return database.read(
        lambda connection: [_entry(row) for row in connection.execute(chosen).mappings()]
    )


def _entry(row: RowMapping) -> AuditEntry:
    fact = AuditFact(
        at_ms=row["at_ms"],
        actor=Actor(**{name: row[name] for name in _ACTOR}),
        deed=Deed(**{name: row[name] for name in _DEED}),
    )
    return AuditEntry(seq=row["seq"], fact=fact, previous=row["previous"], digest=row["digest"])
