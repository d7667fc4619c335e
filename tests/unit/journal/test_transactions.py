"""Pieces of writing transactions: only who runs an operation writes, and rows are numbered."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from tests.support.journals import WEB1
from vmckpt.errors import JournalError, LeaseLost
from vmckpt.journal import controller_identity, schema, transactions
from vmckpt.journal.database import Database
from vmckpt.journal.open_database import open_database
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

ME = controller_identity.this_process()
GUEST = "guest/u-1"


@pytest.fixture
def database(journal: Journal, place: Path | str) -> Iterator[Database]:
    """The journal's, once more."""
    del journal
    with closing(open_database(place, busy=Seconds(5.0), read_only=False)) as made:
        yield made


def guarded(id_: str, **more: object) -> Callable[[Connection], None]:
    return lambda connection: transactions.guard(connection, id_, **more)  # type: ignore[arg-type]


def test_an_operation_is_found_locked_or_not(journal: Journal, database: Database) -> None:
    id_ = journal.begin(WEB1)
    for lock in (False, True):
        found = database.write(partial(transactions.stored_operation, id_=id_, lock=lock))
        assert found == journal.operation(id_)
    assert database.read(lambda it: transactions.stored_operation(it, "m-none")) is None


def test_only_who_runs_an_operation_writes_to_it(journal: Journal, database: Database) -> None:
    id_ = journal.begin(WEB1)
    database.write(guarded(id_, by=ME, active=True))
    with pytest.raises(LeaseLost, match=r"process .* has taken over the job"):
        database.write(guarded(id_, by=replace(ME, started=1)))
    with pytest.raises(JournalError, match="the journal contains no job m-none"):
        database.write(guarded("m-none"))
    journal.finish(id_, "cancelled", None)
    database.write(guarded(id_, by=ME))
    with pytest.raises(LeaseLost, match="another process has ended the job: cancelled"):
        database.write(guarded(id_, by=ME, active=True))


def test_only_the_last_fence_counts(journal: Journal, database: Database) -> None:
    id_ = journal.begin(WEB1)
    fence = journal.acquire(id_, GUEST)
    database.write(guarded(id_, fence=fence, active=True))
    for wrong in (replace(fence, token=fence.token - 1), replace(fence, resource="guest/other")):
        with pytest.raises(LeaseLost, match=r"has taken over the lease guest/"):
            database.write(guarded(id_, fence=wrong))


def test_rows_are_numbered_without_gaps_for_each_operation(
    journal: Journal, database: Database
) -> None:
    first, second = journal.begin(WEB1), journal.begin(WEB1)
    event = {"at": 1.0, "kind": "noted", "data": {}}
    table = schema.events
    for id_, count in ((first, 2), (second, 1), (first, 3)):
        database.write(partial(transactions.append, table=table, id_=id_, made=[event] * count))
    last = database.write(lambda it: transactions.append_one(it, table, first, event))
    chosen = select(table.c.seq).where(table.c.operation == first).order_by(table.c.seq)
    assert database.read(lambda it: list(it.execute(chosen).scalars())) == [1, 2, 3, 4, 5, 6]
    assert last == 6
    assert len(journal.events(second)) == 1
