"""The journal, for reading and writing. Every call is a short transaction."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, insert, select, update
from sqlalchemy.exc import IntegrityError

from vmckpt.errors import BadInput, JournalError
from vmckpt.journal import (
    audit_trail,
    controller_identity,
    leases,
    open_database,
    row_mapping,
    schema,
    systemd_log,
    transactions,
)
from vmckpt.journal import location as locations
from vmckpt.journal import prune as journal_prune
from vmckpt.journal.audit_chain import AuditEntry, Deed, What
from vmckpt.journal.queries import Reader
from vmckpt.journal.records import (
    Batch,
    Changes,
    ControllerIdentity,
    NewOperation,
    Operation,
    Record,
    Request,
    State,
    StepState,
    StoredForecast,
    became_of_steps,
)
from vmckpt.journal.sample_thinning import Retention
from vmckpt.journal.serialization import plain
from vmckpt.lease import controller_lease
from vmckpt.lease.controller_lease import Fence
from vmckpt.units import Seconds

T = TypeVar("T")

_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"
"""Letters and digits, except characters that are easily confused: 0 and o; 1, i and l."""


def new_id(kind: str, length: int = 4) -> str:
    """Return a random job ID that is easy to read aloud, such as "m-7k3f".

    `length`: the number of characters after the dash.
    """
    return f"{kind[:1]}-" + "".join(secrets.choice(_LETTERS) for _ in range(length))


class Journal(Reader):
    """A journal in a file or at a URL (postgresql://user@host/database). Close it after use.

    `place`: None means `location.default()`. `busy`: maximum wait, in seconds, for other writers.
    `clock` replaces the database's clock. Every method raises JournalError if the database fails.
    With `read_only`, all methods that write raise ReadOnly.
    """

    def __init__(
        self,
        place: Path | str | None = None,
        *,
        busy: Seconds = Seconds(5.0),
        clock: Callable[[], float] | None = None,
        read_only: bool = False,
    ) -> None:
        meant = locations.default() if place is None else place
        super().__init__(open_database.open_database(meant, busy=busy, read_only=read_only), clock)
        self.place = meant
        """The location, for opening the same journal again. A URL may contain a password."""

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    # Calls of the process that controls the operation

    def begin(
        self,
        new: NewOperation,
        *,
        asked_by: str | None = None,
        asked_from: str | None = None,
        controller: ControllerIdentity | None = None,
    ) -> str:
        """Record a new operation that this process controls. Returns the operation's ID.

        The record counts as the controller's first heartbeat.
        """
        row = row_mapping.new_operation(
            new,
            controller or controller_identity.this_process(),
            asked_by=asked_by or controller_identity.asked_by(),
            asked_from=asked_from or controller_identity.asked_from(),
        )
        now = self._now()
        made = insert(schema.operations).values(
            began_at=now, alive_until=now + controller_lease.TTL, **row
        )

        def work(connection: Connection) -> tuple[None, Deed]:
            connection.execute(made.values(id=id_))
            return None, audit_trail.about_job(connection, id_, What.BEGAN)

        for attempt in range(40):
            id_ = new_id(new.kind, 4 + attempt // 10)
            try:
                self._audited(work)
            except JournalError as exc:
                if not isinstance(exc.__cause__, IntegrityError):
                    raise
            else:
                return id_
        raise JournalError(f"{self}: cannot find an unused job ID")

    def write(
        self,
        id_: str,
        batch: Batch,
        fence: Fence | None = None,
        *,
        by: ControllerIdentity | None = None,
    ) -> None:
        """Write the batch completely, or not at all.

        Raises LeaseLost, and writes nothing, if `fence` no longer has the latest token of its
        lease, or if `by` is no longer the operation's controller.
        """

        def work(connection: Connection) -> tuple[None, Deed | None]:
            transactions.guard(connection, id_, fence=fence, by=by)
            return None, self._put(connection, id_, batch)

        self._audited(work)

    def _audited(self, work: Callable[[Connection], tuple[T, Deed | None]]) -> T:
        """Run `work` in a transaction that writes, and append its deed to the audit trail.

        Returns the result of `work`.
        """
        actor = controller_identity.actor()  # looking up names can take time, so not within `both`

        def both(connection: Connection) -> tuple[T, AuditEntry | None]:
            made, deed = work(connection)
            if deed is None:
                return made, None
            now = self._now()
            return made, audit_trail.append(connection, self._database, actor, deed, now)

        made, entry = self._database.write(both)
        if entry is not None:  # it is committed: a head that does not exist must not be logged
            systemd_log.audited(entry)
        return made

    def _put(self, connection: Connection, id_: str, batch: Batch) -> Deed | None:
        """Write a batch. Returns the end, if the batch ends the operation."""
        if batch.changes:
            changed = update(schema.operations).where(schema.operations.c.id == id_)
            connection.execute(changed.values(plain(batch.changes)))
        made = [{"made_at": one.made_at, "data": plain(one.values)} for one in batch.forecasts]
        for table, new in (
            (schema.events, [_event(one) for one in batch.events]),
            (schema.samples, [_sample(one) for one in batch.samples]),
            (schema.forecasts, made),
        ):
            if new:
                transactions.append(connection, table, id_, new)
        for request, ok, text in batch.answers:
            self._answer(connection, schema.requests.c.id == request, text, ok)
        return None if batch.ending is None else self._end(connection, id_, *batch.ending)

    def update(self, id_: str, changes: Changes) -> None:
        self.write(id_, Batch(changes=changes))

    def add_event(self, id_: str, event: Record) -> None:
        self.write(id_, Batch(events=[event]))

    def add_samples(self, id_: str, samples: Sequence[Record]) -> None:
        self.write(id_, Batch(samples=list(samples)))

    def add_forecast(self, id_: str, values: Mapping[str, Any]) -> None:
        made = StoredForecast(made_at=self.now(), values=values)
        self.write(id_, Batch(forecasts=[made]))

    def finish(self, id_: str, outcome: str, report: Mapping[str, Any] | None) -> None:
        """Record that the operation has ended, unless its end is already recorded.

        Releases the operation's leases, and closes its open steps and requests.
        """
        self.write(id_, Batch(ending=(outcome, report)))

    def _end(
        self, connection: Connection, id_: str, outcome: str, report: Mapping[str, Any] | None
    ) -> Deed | None:
        table = schema.operations
        # Samples are stored in a separate table, in which they are thinned.
        kept = plain(report and {k: v for k, v in report.items() if k != "samples"})
        ended = {"state": State.ENDED, "outcome": outcome, "report": kept}
        first = connection.execute(
            update(table)
            .where(table.c.id == id_, table.c.ended_at.is_(None))
            .values(ended_at=self._now(), **ended)
        ).rowcount
        # This must be in the same transaction as the end, because recovery undoes open steps of an
        # active operation.
        steps = schema.steps
        became = {"state": became_of_steps(outcome), "ended_at": self._now()}
        connection.execute(
            update(steps)
            .where(steps.c.operation == id_, steps.c.state == StepState.INTENDED)
            .values(**became)
        )
        leases.release_all(connection, id_)
        theirs = schema.requests.c.operation == id_
        self._answer(connection, theirs, f"{id_} has ended: {outcome}", ok=False)
        if not first:
            return None
        return audit_trail.about_job(connection, id_, What.ENDED, outcome=outcome)

    # Requests from other terminals

    def ask(self, id_: str, kind: str, arguments: Mapping[str, Any], by: str) -> int:
        """Record a request to a running operation. Returns the request's ID.

        `kind` and `arguments`: see `RequestKind`. `by`: the requesting user, as user@host. Raises
        BadInput if the operation has ended or does not exist.
        """
        row = {"operation": id_, "kind": kind, "arguments": plain(arguments), "asked_by": by}
        made = insert(schema.requests).values(asked_at=self._now(), **row)

        def work(connection: Connection) -> tuple[int, Deed]:
            found = transactions.stored_operation(connection, id_, lock=True)
            if found is None or not found.active:
                outcome = "does not exist" if found is None else f"has ended: {found.outcome}"
                raise BadInput(f"job {id_} {outcome}", hint="run vmckpt jobs --all")
            key = connection.execute(made).inserted_primary_key
            deed = audit_trail.about_job(connection, id_, What.REQUESTED, step=kind)
            return int(key[0]) if key else 0, deed

        return self._audited(work)

    def take_requests(self, id_: str) -> list[Request]:
        """Take and return an operation's new requests. The caller must answer each request."""
        table = schema.requests
        fresh = (
            table.c.operation == id_,
            table.c.answered_at.is_(None),
            table.c.taken_at.is_(None),
        )
        if not self._requests(*fresh):  # the common case, which needs no lock
            return []

        def work(connection: Connection) -> list[Request]:
            chosen = select(table).where(*fresh).order_by(table.c.id).with_for_update()
            taken = [row_mapping.request(row) for row in connection.execute(chosen).mappings()]
            # Update by ID, because another request may have arrived since the query.
            these = table.c.id.in_([one.id for one in taken])
            connection.execute(update(table).where(these).values(taken_at=self._now()))
            return taken

        return self._database.write(work)

    def answer(self, request: int, text: str, ok: bool) -> None:
        which = schema.requests.c.id == request
        self._database.write(lambda connection: self._answer(connection, which, text, ok))

    def _answer(self, connection: Connection, which: Any, text: str, ok: bool) -> None:
        table = schema.requests
        answered = {"answered_at": self._now(), "answer": text, "ok": ok}
        connection.execute(
            update(table).where(which, table.c.answered_at.is_(None)).values(**answered)
        )

    def withdraw(self, request: int) -> bool:
        """Withdraw a request.

        Returns False if the controller has already taken the request, and may carry it out.
        """
        table = schema.requests
        untouched = (
            table.c.id == request,
            table.c.taken_at.is_(None),
            table.c.answered_at.is_(None),
        )
        gone = {"answered_at": self._now(), "answer": "withdrawn", "ok": False}
        return self._execute(update(table).where(*untouched).values(**gone)) > 0

    # Leases and control

    def acquire(self, id_: str, resource: str, *, by: ControllerIdentity | None = None) -> Fence:
        """Acquire a lease for an operation, or return the lease that the operation already holds.

        Raises GuestLocked if another active operation holds the lease. Raises LeaseLost if `by` is
        no longer the operation's controller or the operation has ended.
        """
        return self._database.write(
            lambda connection: leases.acquire(
                connection, self._database, id_, resource, now=self._now(), by=by
            )
        )

    def release(self, fence: Fence) -> None:
        """Release a lease. The end of its operation also releases it."""
        self._database.write(lambda connection: leases.release(connection, fence))

    def heartbeat(
        self,
        id_: str,
        ttl: Seconds = controller_lease.TTL,
        fence: Fence | None = None,
        *,
        by: ControllerIdentity | None = None,
    ) -> None:
        """Extend this process's control of the operation to `ttl` seconds from now.

        Raises LeaseLost if this process no longer controls the operation.
        """
        me = by or controller_identity.this_process()
        self._database.write(
            lambda connection: leases.heartbeat(
                connection, id_, ttl=ttl, fence=fence, now=self._now(), by=me
            )
        )

    def take_over(self, operation: Operation) -> Fence | None:
        """Make this process the controller of an operation that is abandoned or run by agents.

        Returns the lease on the operation's guest; None if the operation has no guest. Raises
        GuestLocked if the operation's controller is alive, the operation has ended, or another
        operation holds the guest's lease.
        """
        me = controller_identity.this_process()

        def work(connection: Connection) -> tuple[Fence | None, Deed]:
            now = self._now()
            fence = leases.take_over(connection, self._database, operation, now=now, by=me)
            return fence, audit_trail.about_job(connection, operation.id, What.TAKEN_OVER)

        return self._audited(work)

    def leave(self, id_: str, *, by: ControllerIdentity | None = None) -> None:
        """Give up control of an active operation, so that recovery can take it over immediately.

        Raises LeaseLost if another controller has already taken over.
        """
        me = by or controller_identity.this_process()
        self._database.write(lambda connection: leases.leave(connection, id_, by=me))

    def entrust(self, id_: str, to: str, *, by: ControllerIdentity | None = None) -> None:
        """Delegate an operation to agents on hosts, which continue it without a controller.

        `to`: the host or hosts, for messages. Raises LeaseLost if another controller has taken the
        operation over.
        """
        me = by or controller_identity.this_process()
        self._database.write(lambda connection: leases.entrust(connection, id_, to, by=me))

    # Steps: each step is recorded before it is tried; its result is recorded afterwards

    def intend(
        self,
        id_: str,
        name: str,
        intent: Mapping[str, Any],
        fence: Fence | None,
        *,
        by: ControllerIdentity | None = None,
    ) -> int:
        """Record a step before the step is taken. On return the record is on disk.

        Returns the step's number. Raises LeaseLost if the operation has ended or has lost its
        lease, or if `by` is no longer the operation's controller.
        """
        row = {"name": name, "intent": plain(intent), "state": StepState.INTENDED}

        def work(connection: Connection) -> tuple[int, Deed]:
            transactions.guard(connection, id_, fence=fence, by=by, active=True)
            new = {**row, "began_at": self._now()}
            number = transactions.append_one(connection, schema.steps, id_, new)
            return number, audit_trail.about_job(connection, id_, What.INTENDED, step=name)

        return self._audited(work)

    def conclude(
        self,
        id_: str,
        seq: int,
        state: StepState,
        result: Mapping[str, Any] | None,
        fence: Fence | None,
        *,
        by: ControllerIdentity | None = None,
    ) -> None:
        """Record the result of a step. With `StepState.INTENDED`, the step stays open.

        Raises LeaseLost in the same cases as `write`.
        """
        table = schema.steps
        ended = None if state is StepState.INTENDED else self._now()
        concluded = {"state": state, "result": plain(result), "ended_at": ended}
        this = (table.c.operation == id_, table.c.seq == seq)

        def work(connection: Connection) -> tuple[None, Deed | None]:
            transactions.guard(connection, id_, fence=fence, by=by)
            changed = update(table).where(*this).values(**concluded).returning(table.c.name)
            name = connection.execute(changed).scalar()
            if name is None:
                raise JournalError(f"{self}: {id_} has no step {seq}")
            if ended is None:
                return None, None
            deed = {"step": name, "outcome": state}
            return None, audit_trail.about_job(connection, id_, What.CONCLUDED, **deed)

        self._audited(work)

    def audit_command(
        self, what: What, command: str, *, guest: str | None = None, outcome: str | None = None
    ) -> None:
        """Record in the audit trail that a command was allowed or refused.

        `guest`: its argument, if any. `outcome`: why it was refused.
        """
        deed = Deed(
            what=what, job=None, kind=None, guest=guest, source=None, target=None, step=command,
            outcome=outcome,
        )  # fmt: skip
        self._audited(lambda _: (None, deed))

    def prune(
        self, *, retention: Retention = journal_prune.RETENTION, budget: Seconds = Seconds(1.0)
    ) -> journal_prune.Pruned | None:
        """Delete old operations and thin samples, for at most `budget` seconds.

        Returns None if the journal was pruned within the last hour.
        """
        return journal_prune.prune(self._database, self.now(), retention, budget)

    def _execute(self, statement: Any) -> int:
        """Execute one statement in a transaction. Returns the number of changed rows."""
        count: int = self._database.write(lambda connection: connection.execute(statement).rowcount)
        return count


def _event(one: Record) -> dict[str, Any]:
    return {"at": one.at, "kind": one.kind, "data": dict(one.values)}


def _sample(one: Record) -> dict[str, Any]:
    return {"at": one.at, "data": dict(one.values)}
