"""The journal: every call is one short transaction. Errors are JournalError."""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, Table, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from vmckpt.errors import BadInput, JournalError
from vmckpt.journal import history, identity, lookup, pruning, rows, schema
from vmckpt.journal.database import Database
from vmckpt.journal.forms import plain
from vmckpt.journal.history import PastMove
from vmckpt.journal.place import journal_file
from vmckpt.journal.records import (
    Batch,
    Changes,
    Controller,
    NewOperation,
    Operation,
    Record,
    Request,
    State,
    StoredEvent,
    StoredForecast,
    StoredSample,
)
from vmckpt.journal.thinning import Retention
from vmckpt.units import Seconds

_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"
"""Without those that are mistaken for others: 0 and o, 1, i and l."""
_MOST = 100_000


def new_id(kind: str, length: int = 4) -> str:
    """A short name that can be said aloud: "m-7k3f"."""
    return f"{kind[:1]}-" + "".join(secrets.choice(_LETTERS) for _ in range(length))


class Journal:
    """The journal in one file, `journal_file()` if none is named."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        busy: Seconds = Seconds(5.0),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path or journal_file()
        self._clock = clock
        self._database = Database(self.path, busy=busy)
        try:
            with self._database.reading() as connection:
                found = schema.version(connection)
            if schema.refuse_newer(found, str(self._database)):
                with self._database.writing() as connection:
                    schema.prepare(connection, str(self._database))
        except JournalError:
            self._database.close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    # Writing, by the process that runs the operation

    def begin(
        self,
        new: NewOperation,
        *,
        asked_by: str | None = None,
        asked_from: str | None = None,
        controller: Controller | None = None,
    ) -> str:
        """Write down an operation that begins, run by this process; its id."""
        row = rows.new_operation(
            new,
            controller or identity.this_process(),
            asked_by=asked_by or identity.asked_by(),
            asked_from=asked_from or identity.asked_from(),
            at=self._clock(),
        )
        for attempt in range(40):
            id_ = new_id(new.kind, 4 + attempt // 10)
            try:
                with self._database.writing() as connection:
                    connection.execute(insert(schema.operations).values(id=id_, **row))
            except JournalError as exc:
                if not isinstance(exc.__cause__, IntegrityError):
                    raise
            else:
                return id_
        raise JournalError(f"{self._database}: no free job id was found")

    def write(self, id_: str, batch: Batch) -> None:
        """Everything in `batch`, or nothing."""
        with self._database.writing() as connection:
            if batch.changes:
                changed = update(schema.operations).where(schema.operations.c.id == id_)
                connection.execute(changed.values(plain(batch.changes)))
            _append(connection, schema.events, id_, [_event(one) for one in batch.events])
            _append(connection, schema.samples, id_, [_sample(one) for one in batch.samples])
            made = [{"made_at": one.made_at, "data": plain(one.values)} for one in batch.forecasts]
            _append(connection, schema.forecasts, id_, made)
            for request, ok, text in batch.answers:
                self._answer(connection, schema.requests.c.id == request, text, ok)
            if batch.ending is not None:
                self._end(connection, id_, *batch.ending)

    def update(self, id_: str, changes: Changes) -> None:
        self.write(id_, Batch(changes=changes))

    def add_event(self, id_: str, event: Record) -> None:
        self.write(id_, Batch(events=[event]))

    def add_samples(self, id_: str, samples: Sequence[Record]) -> None:
        self.write(id_, Batch(samples=list(samples)))

    def add_forecast(self, id_: str, values: Mapping[str, Any]) -> None:
        made = StoredForecast(made_at=self._clock(), values=values)
        self.write(id_, Batch(forecasts=[made]))

    def finish(self, id_: str, outcome: str, report: Mapping[str, Any] | None) -> None:
        """The operation has ended. What another process said about its end before, stands."""
        self.write(id_, Batch(ending=(outcome, report)))

    def _end(
        self, connection: Connection, id_: str, outcome: str, report: Mapping[str, Any] | None
    ) -> None:
        table = schema.operations
        # Samples have a table of their own, in which they are thinned.
        kept = plain(report and {k: v for k, v in report.items() if k != "samples"})
        ended = {"state": State.ENDED, "outcome": outcome, "report": kept}
        connection.execute(
            update(table)
            .where(table.c.id == id_, table.c.ended_at.is_(None))
            .values(ended_at=self._clock(), **ended)
        )
        theirs = schema.requests.c.operation == id_
        self._answer(connection, theirs, f"{id_} has ended: {outcome}", ok=False)

    # Requests from other terminals

    def ask(self, id_: str, kind: str, arguments: Mapping[str, Any], by: str) -> int:
        """Ask a running operation for something; the request's number.

        Raises BadInput if the operation has ended.
        """
        with self._database.writing() as connection:
            found = _one(connection, id_)
            if found is None or not found.active:
                outcome = "is not known" if found is None else f"has ended: {found.outcome}"
                raise BadInput(f"job {id_} {outcome}", mend="run vmckpt jobs --all")
            row = {"operation": id_, "kind": kind, "arguments": plain(arguments), "asked_by": by}
            made = insert(schema.requests).values(asked_at=self._clock(), **row)
            key = connection.execute(made).inserted_primary_key
        return int(key[0]) if key else 0

    def open_requests(self, id_: str) -> list[Request]:
        """Requests that nobody has answered."""
        table = schema.requests
        return self._requests(table.c.operation == id_, table.c.answered_at.is_(None))

    def requests(self, id_: str) -> list[Request]:
        return self._requests(schema.requests.c.operation == id_)

    def request(self, request: int) -> Request:
        return self._requests(schema.requests.c.id == request)[0]

    def _requests(self, *where: Any) -> list[Request]:
        chosen = select(schema.requests).where(*where).order_by(schema.requests.c.id)
        return self._read(chosen, rows.request)

    def take_requests(self, id_: str) -> list[Request]:
        """Open requests that were not taken before. Whoever takes one must answer it."""
        table = schema.requests
        fresh = (
            table.c.operation == id_,
            table.c.answered_at.is_(None),
            table.c.taken_at.is_(None),
        )
        if not self._requests(*fresh):  # the common case takes no lock
            return []
        with self._database.writing() as connection:
            chosen = select(table).where(*fresh).order_by(table.c.id)
            taken = [rows.request(row) for row in connection.execute(chosen).mappings()]
            connection.execute(update(table).where(*fresh).values(taken_at=self._clock()))
        return taken

    def answer(self, request: int, text: str, ok: bool) -> None:
        with self._database.writing() as connection:
            self._answer(connection, schema.requests.c.id == request, text, ok)

    def _answer(self, connection: Connection, which: Any, text: str, ok: bool) -> None:
        table = schema.requests
        answered = {"answered_at": self._clock(), "answer": text, "ok": ok}
        connection.execute(
            update(table).where(which, table.c.answered_at.is_(None)).values(**answered)
        )

    def withdraw(self, request: int) -> bool:
        """Take a request back; False if the controller was faster: then it may be done."""
        table = schema.requests
        untouched = (
            table.c.id == request,
            table.c.taken_at.is_(None),
            table.c.answered_at.is_(None),
        )
        gone = {"answered_at": self._clock(), "answer": "withdrawn", "ok": False}
        with self._database.writing() as connection:
            return connection.execute(update(table).where(*untouched).values(**gone)).rowcount > 0

    # Reading

    def operation(self, name: str, *, ended: bool = False) -> Operation:
        """By id, the beginning of one, or a guest with one active operation; else BadInput.

        With `ended` a guest without an active one stands for its last.
        """
        table = schema.operations
        called = table.c.id == name.lower()
        if lookup.is_prefix(name):
            called = table.c.id.startswith(name.lower(), autoescape=True)
        fits = or_(called, table.c.guest == name)
        found = self._read(
            select(table).where(fits).order_by(table.c.began_at.desc()).limit(_MOST), rows.operation
        )
        chosen = lookup.choose(name, found, ended=ended)
        if chosen is not None:
            return chosen
        names = {one.id for one in self.operations()} | {
            one.guest for one in self.operations(active=True)
        }
        raise lookup.unknown(name, sorted(names))

    def operations(self, *, active: bool | None = None, limit: int = 200) -> list[Operation]:
        """The latest first; all, or only those that have or have not ended."""
        table = schema.operations
        chosen = select(table).order_by(table.c.began_at.desc()).limit(limit)
        if active is not None:
            ended = table.c.ended_at
            chosen = chosen.where(ended.is_(None) if active else ended.is_not(None))
        return self._read(chosen, rows.operation)

    def recent(self, guest_uuid: str, since: float) -> list[Operation]:
        """Operations on a guest that began after a time, the latest first."""
        table = schema.operations
        chosen = select(table).where(table.c.guest_uuid == guest_uuid, table.c.began_at >= since)
        return self._read(chosen.order_by(table.c.began_at.desc()), rows.operation)

    def recent_moves(
        self, source: str, target: str, limit: int = 20, *, guest_uuid: str | None = None
    ) -> list[PastMove]:
        """Ended migrations from one host to another, the latest first; of one guest, or all."""
        table = schema.operations
        chosen = select(table).where(
            table.c.source == source,
            table.c.target == target,
            table.c.ended_at.is_not(None),
            table.c.report.is_not(None),
        )
        if guest_uuid is not None:
            chosen = chosen.where(table.c.guest_uuid == guest_uuid)
        found = self._read(chosen.order_by(table.c.ended_at.desc()).limit(limit), rows.operation)
        return [move for one in found if (move := history.past_move(one)) is not None]

    def events(self, id_: str, after: int = 0) -> list[StoredEvent]:
        return self._read(_after(schema.events, id_, after), rows.stored_event)

    def samples(self, id_: str, after: int = 0) -> list[StoredSample]:
        return self._read(_after(schema.samples, id_, after), rows.stored_sample)

    def last_sample(self, id_: str) -> StoredSample | None:
        return next(iter(self._read(_last(schema.samples, id_), rows.stored_sample)), None)

    def forecast(self, id_: str) -> StoredForecast | None:
        """The last one that was made."""
        return next(iter(self._read(_last(schema.forecasts, id_), rows.stored_forecast)), None)

    def _read(self, chosen: Select[Any], made: Callable[[Any], lookup.T]) -> list[lookup.T]:
        with self._database.reading() as connection:
            return [made(row) for row in connection.execute(chosen).mappings()]

    def prune(
        self, *, retention: Retention = pruning.RETENTION, budget: Seconds = Seconds(1.0)
    ) -> pruning.Pruned | None:
        """Thin and forget what is old, once an hour at the most; None if it was done lately."""
        return pruning.prune(self._database, self._clock(), retention, budget)


def _one(connection: Connection, id_: str) -> Operation | None:
    chosen = select(schema.operations).where(schema.operations.c.id == id_)
    row = connection.execute(chosen).mappings().first()
    return None if row is None else rows.operation(row)


def _after(table: Table, id_: str, after: int) -> Select[Any]:
    chosen = select(table).where(table.c.operation == id_, table.c.seq > after)
    return chosen.order_by(table.c.seq).limit(_MOST)


def _last(table: Table, id_: str) -> Select[Any]:
    return select(table).where(table.c.operation == id_).order_by(table.c.seq.desc()).limit(1)


def _event(one: Record) -> dict[str, Any]:
    return {"at": one.at, "kind": one.kind, "data": dict(one.values)}


def _sample(one: Record) -> dict[str, Any]:
    return {"at": one.at, "data": dict(one.values)}


def _append(connection: Connection, table: Table, id_: str, made: list[dict[str, Any]]) -> None:
    if not made:
        return
    last = connection.execute(
        select(func.coalesce(func.max(table.c.seq), 0)).where(table.c.operation == id_)
    ).scalar_one()
    connection.execute(
        insert(table),
        [{"operation": id_, "seq": seq, **row} for seq, row in enumerate(made, start=last + 1)],
    )
