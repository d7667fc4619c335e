"""Leases and controllers in the journal: acquire, renew and release, in one transaction each.

A lease is held as long as its operation is active, attended or not: an interrupted operation keeps
its guest until it is settled. Its token grows with each change of holder and is checked in the
transaction that writes.
"""

from dataclasses import replace

from sqlalchemy import ColumnElement, Connection, RowMapping, select, update

from vmckpt.errors import GuestLocked
from vmckpt.journal import controller_identity, row_mapping, schema, transactions
from vmckpt.journal.database import Database
from vmckpt.journal.records import ControllerIdentity, Operation, utc
from vmckpt.lease import controller_lease
from vmckpt.lease.controller_lease import Fence, guest_of, guest_resource
from vmckpt.units import Seconds

Now = ColumnElement[float]


def abandoned(operation: Operation, now: float) -> bool:
    """Whether an operation is active and nobody attends it."""
    if operation.controller.entrusted:
        return False
    alive = controller_identity.is_alive(operation.controller)
    return operation.active and controller_lease.abandoned(alive, operation.alive_until, now)


def acquire(
    connection: Connection,
    database: Database,
    id_: str,
    resource: str,
    *,
    now: Now,
    by: ControllerIdentity | None,
) -> Fence:
    """Take a lease for an operation. Raises GuestLocked if another one holds it."""
    transactions.guard(connection, id_, by=by, active=True)
    if (uuid := guest_of(resource)) is not None:
        # Whoever takes the operation over must know whose lease it has.
        table = schema.operations
        connection.execute(update(table).where(table.c.id == id_).values(guest_uuid=uuid))
    lease = _locked(connection, database, resource)
    if lease["operation"] == id_:
        return Fence(resource=resource, token=lease["token"], operation=id_)
    _refuse_held(connection, lease, now)
    return _hand_over(connection, lease, id_, now)


def release(connection: Connection, fence: Fence) -> None:
    """Give a lease back; nothing is done if somebody else has it by now."""
    table = schema.leases
    ours = (table.c.resource == fence.resource, table.c.token == fence.token)
    connection.execute(update(table).where(*ours).values(operation=None))


def release_all(connection: Connection, id_: str) -> None:
    """Give back what an operation holds."""
    table = schema.leases
    connection.execute(update(table).where(table.c.operation == id_).values(operation=None))


def heartbeat(
    connection: Connection,
    id_: str,
    *,
    ttl: Seconds,
    fence: Fence | None,
    now: Now,
    by: ControllerIdentity,
) -> None:
    """Write down that the controller lives. Raises LeaseLost if it is no longer the controller."""
    transactions.guard(connection, id_, fence=fence, by=by, active=True)
    table = schema.operations
    connection.execute(update(table).where(table.c.id == id_).values(alive_until=now + ttl))


def take_over(
    connection: Connection,
    database: Database,
    operation: Operation,
    *,
    now: Now,
    by: ControllerIdentity,
) -> Fence | None:
    """Make `by` the controller of an operation that is abandoned, and give it the guest's lease.

    Raises GuestLocked if there is nothing to take over any more: somebody was faster, it has ended,
    its controller lives after all, or another operation has the guest.
    """
    found = transactions.stored_operation(connection, operation.id, lock=True)
    if found is None or not found.active:
        outcome = "is gone" if found is None else f"has ended: {found.outcome}"
        raise GuestLocked(f"{operation.id} {outcome}; there is nothing to take over")
    time = connection.execute(select(now)).scalar_one()
    # What this very process has left, and could not write down that it did.
    forgotten = found.controller == by and (found.alive_until or time) < time
    free = found.controller.entrusted or abandoned(found, time) or forgotten
    if found.controller != operation.controller or not free:
        controller = found.controller
        raise GuestLocked(
            f"{found.id} is attended by process {controller.pid} on {controller.host}",
            hint=f"vmckpt watch {found.id} shows what it does",
        )
    fence = None
    if found.guest_uuid is not None:
        lease = _locked(connection, database, guest_resource(found.guest_uuid))
        if lease["operation"] != found.id:
            _refuse_held(connection, lease, now)
        fence = _hand_over(connection, lease, found.id, now)
    table = schema.operations
    taken = {**row_mapping.controlled_by(by), "alive_until": now + controller_lease.TTL}
    connection.execute(update(table).where(table.c.id == found.id).values(**taken))
    return fence


def leave(connection: Connection, id_: str, *, by: ControllerIdentity) -> None:
    """Nobody attends an operation from now on that has not ended. Its lease it keeps."""
    transactions.guard(connection, id_, by=by)
    nobody = row_mapping.controlled_by(replace(by, pid=0, started=0))
    table = schema.operations
    connection.execute(update(table).where(table.c.id == id_).values(alive_until=0.0, **nobody))


def entrust(connection: Connection, id_: str, to: str, *, by: ControllerIdentity) -> None:
    """Agents on hosts go on with an operation; `to` says where. Its lease it keeps."""
    transactions.guard(connection, id_, by=by)
    agents = row_mapping.controlled_by(ControllerIdentity(host=to, boot="", pid=0, started=0))
    table = schema.operations
    connection.execute(update(table).where(table.c.id == id_).values(alive_until=None, **agents))


def _locked(connection: Connection, database: Database, resource: str) -> RowMapping:
    """A lease, which nobody else changes until this transaction ends."""
    table = schema.leases
    chosen = select(table).where(table.c.resource == resource).with_for_update()
    found = connection.execute(chosen).mappings().first()
    if found is None:
        new = database.insert_new(table).values(resource=resource, token=0)
        connection.execute(new)
        found = connection.execute(chosen).mappings().one()
    return found


def _hand_over(connection: Connection, lease: RowMapping, id_: str, now: Now) -> Fence:
    table, token = schema.leases, lease["token"] + 1
    taken = {"operation": id_, "token": token, "taken_at": now}
    connection.execute(update(table).where(table.c.resource == lease["resource"]).values(**taken))
    return Fence(resource=lease["resource"], token=token, operation=id_)


def _refuse_held(connection: Connection, lease: RowMapping, now: Now) -> None:
    """Raise GuestLocked if somebody holds a lease, which is locked."""
    holder = lease["operation"] and transactions.stored_operation(connection, lease["operation"])
    if not holder or not holder.active:
        return
    what = "host" if guest_of(lease["resource"]) is None else "guest"
    if abandoned(holder, connection.execute(select(now)).scalar_one()):
        raise GuestLocked(
            f"{what} {holder.guest} has an operation that was interrupted and is not settled:"
            f" {holder.id} ({holder.kind}), asked for by {holder.asked_by},"
            f" {utc(holder.began_at)}",
            hint="run vmckpt recover",
        )
    controller = holder.controller
    if controller.entrusted:
        raise GuestLocked(
            f"guest {holder.guest} is protected ({holder.id}), by agents on {controller.host}",
            hint=f"run vmckpt unprotect {holder.guest} first",
        )
    raise GuestLocked(
        f"{what} {holder.guest} has an operation already: {holder.id} ({holder.kind}), asked for by"
        f" {holder.asked_by}, since {utc(holder.began_at)}, run by process {controller.pid} on"
        f" {controller.host}",
        hint=f"vmckpt watch {holder.id} shows it, vmckpt cancel {holder.id} ends it; should its"
        " controller have died, vmckpt recover takes it over",
    )
