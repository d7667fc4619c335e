"""Prune the journal: delete old operations, and thin samples as decided by `sample_thinning`."""

import time
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, bindparam, delete, false, or_, select, update

from vmckpt.journal import sample_thinning, schema
from vmckpt.journal.database import Database
from vmckpt.journal.sample_thinning import Retention
from vmckpt.units import Seconds

RETENTION = Retention()
_EVERY = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The result of a run of `prune`."""

    operations: int
    """Number of deleted operations."""
    thinned: int
    """Number of operations whose samples were thinned."""
    complete: bool
    """Whether all work was done; if not, the controller of the next operation continues."""


def prune(database: Database, now: float, retention: Retention, budget: Seconds) -> Pruned | None:
    """Delete old operations and thin samples, in short transactions, for at most `budget` seconds.

    `now`: seconds since 1970; `retention`: what is kept for how long. Returns None if the journal
    was pruned within the last hour. Raises JournalError.
    """
    until = time.monotonic() + budget
    due = database.read(lambda connection: _due(connection, now, retention))
    if due is None:
        return None
    old, waiting = due
    done = 0
    for id_ in old:
        database.write(partial(_forget, id_=id_))
        done += 1
        if time.monotonic() > until:
            return Pruned(operations=done, thinned=0, complete=False)
    for number, (id_, step) in enumerate(waiting):
        if time.monotonic() > until:
            return Pruned(operations=done, thinned=number, complete=False)
        database.write(partial(_thin, id_=id_, step=step, retention=retention))
    database.write(partial(_mark, now=now))
    return Pruned(operations=done, thinned=len(waiting), complete=True)


def _due(
    connection: Connection, now: float, retention: Retention
) -> tuple[list[str], list[tuple[str, int]]] | None:
    """Return the operations to delete, and the operations to thin, each with its retention step.

    Returns None if the journal was pruned recently.
    """
    mark = select(schema.meta.c.value).where(schema.meta.c.key == schema.PRUNED_AT)
    last = connection.execute(mark).scalar()
    # A time in the future was written by a machine with a wrong clock.
    if last is not None and 0 <= now - float(last) < _EVERY:
        return None
    table = schema.operations
    too_old = table.c.ended_at < now - retention.operations
    old = list(connection.execute(select(table.c.id).where(too_old)).scalars())
    late = [
        (table.c.ended_at <= now - step.until) & (table.c.thinned <= number)
        for number, step in enumerate(retention.steps)
    ]
    chosen = select(table.c.id, table.c.ended_at, table.c.thinned).where(
        or_(false(), *late), ~too_old
    )
    steps = [
        (row.id, step)
        for row in connection.execute(chosen.order_by(table.c.ended_at))
        if (step := sample_thinning.due(Seconds(now - row.ended_at), retention)) > row.thinned
    ]
    return old, steps


def _forget(connection: Connection, id_: str) -> None:
    connection.execute(delete(schema.operations).where(schema.operations.c.id == id_))


def _mark(connection: Connection, now: float) -> None:
    marked = update(schema.meta).where(schema.meta.c.key == schema.PRUNED_AT)
    connection.execute(marked.values(value=repr(now)))


def _thin(connection: Connection, id_: str, step: int, retention: Retention) -> None:
    samples, events = schema.samples, schema.events
    if step >= len(retention.steps):
        connection.execute(delete(samples).where(samples.c.operation == id_))
        connection.execute(delete(events).where(events.c.operation == id_))
    else:
        chosen = select(samples.c.seq, samples.c.at).where(samples.c.operation == id_)
        found = connection.execute(chosen.order_by(samples.c.at, samples.c.seq)).all()
        kept = set(sample_thinning.kept([row.at for row in found], retention.steps[step].spacing))
        gone = [{"gone": row.seq} for index, row in enumerate(found) if index not in kept]
        if gone:
            one = (samples.c.operation == id_) & (samples.c.seq == bindparam("gone"))
            connection.execute(delete(samples).where(one), gone)
    marked = update(schema.operations).where(schema.operations.c.id == id_)
    connection.execute(marked.values(thinned=step))
