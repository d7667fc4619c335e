"""Common parts of the journal's writing transactions."""

from typing import Any

from sqlalchemy import Connection, ScalarSelect, Table, func, insert, select

from vmckpt.errors import JournalError, LeaseLost
from vmckpt.journal import row_mapping, schema
from vmckpt.journal.records import ControllerIdentity, Operation
from vmckpt.lease.controller_lease import Fence


def stored_operation(connection: Connection, id_: str, *, lock: bool = False) -> Operation | None:
    """Return an operation; None if there is no operation with this ID.

    With `lock`, the operation is locked until the transaction ends. A transaction that locks both
    an operation and its lease must lock the operation first.
    """
    chosen = select(schema.operations).where(schema.operations.c.id == id_)
    if lock:
        chosen = chosen.with_for_update(key_share=True)  # no effect in SQLite, see `sqlite`
    row = connection.execute(chosen).mappings().first()
    return None if row is None else row_mapping.operation(row)


def guard(
    connection: Connection,
    id_: str,
    *,
    fence: Fence | None = None,
    by: ControllerIdentity | None = None,
    active: bool = False,
) -> None:
    """Lock an operation, and verify that the caller may write to it.

    If given, `by` must be the operation's controller, and `fence` must have the latest token of its
    lease. With `active`, the operation must not have ended and must still hold the lease. Raises
    LeaseLost if a condition is not met, and JournalError if there is no such operation.
    """
    table = schema.operations
    chosen = select(*_GUARDED).where(table.c.id == id_).with_for_update(key_share=True)
    found = connection.execute(chosen).mappings().first()
    if found is None:
        raise JournalError(f"the journal contains no job {id_}")
    controller = row_mapping.controller(found)
    if by is not None and controller != by:
        taker = f"process {controller.pid} on {controller.host} has taken over the job"
        raise _lost(id_, taker if controller.pid else "its controller has given up control")
    if active and found["ended_at"] is not None:
        raise _lost(id_, f"another process has ended the job: {found['outcome']}")
    if fence is not None:
        _see_fence(connection, id_, fence, held=active)


_GUARDED = [
    schema.operations.c[name]
    for name in (
        "ended_at",
        "outcome",
        *(f"controller_{part}" for part in row_mapping.CONTROLLER),
    )
]


def _see_fence(connection: Connection, id_: str, fence: Fence, *, held: bool) -> None:
    table = schema.leases
    chosen = select(table.c.token, table.c.operation).where(table.c.resource == fence.resource)
    found = connection.execute(chosen.with_for_update(read=True)).first()
    if found is None or found.token != fence.token:
        holder = None if found is None or found.operation == id_ else found.operation
        holder = holder or "another controller"
        raise _lost(id_, f"{holder} has taken over the lease {fence.resource}")
    if held and found.operation != id_:
        raise _lost(id_, f"the job has released the lease {fence.resource}")


def _lost(id_: str, why: str) -> LeaseLost:
    return LeaseLost(
        f"this process no longer controls job {id_}: {why}; nothing more was changed",
        hint=f"run vmckpt job {id_}",
    )


def append(connection: Connection, table: Table, id_: str, made: list[dict[str, Any]]) -> None:
    """Insert rows of an operation, with ascending numbers. The operation must be locked."""
    last: int = connection.execute(select(_last(table, id_))).scalar_one()
    connection.execute(
        insert(table),
        [{"operation": id_, "seq": seq, **row} for seq, row in enumerate(made, start=last + 1)],
    )


def append_one(connection: Connection, table: Table, id_: str, made: dict[str, Any]) -> int:
    """Insert one row of an operation, in one statement. Returns the row's number."""
    new = insert(table).values(operation=id_, seq=_last(table, id_) + 1, **made)
    number: int = connection.execute(new.returning(table.c.seq)).scalar_one()
    return number


def _last(table: Table, id_: str) -> ScalarSelect[int]:
    """Return a query for the number of an operation's last row; 0 if there are no rows."""
    highest = select(func.coalesce(func.max(table.c.seq), 0)).where(table.c.operation == id_)
    return highest.scalar_subquery()
