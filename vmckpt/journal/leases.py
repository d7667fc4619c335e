"""Leases and controllers in the journal: acquire, renew and release, each in one transaction.

An operation holds its lease while the operation is active, even without a live controller. So an
interrupted operation keeps its guest locked until the operation is recovered. The lease's token
increases with each change of holder. A transaction that writes under a lease checks the token.
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
    """Return whether an operation is active but has lost its controller.

    `now`: the current time by the journal's clock. Operations delegated to agents are never
    abandoned.
    """
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
    """Acquire a lease for an operation, or return the lease that the operation already holds.

    `by`: the controller that must still run the operation; None: do not check. Raises GuestLocked
    if another active operation holds the lease. Raises LeaseLost if `by` is no longer the
    controller or the operation has ended, and JournalError.
    """
    transactions.guard(connection, id_, by=by, active=True)
    if (uuid := guest_of(resource)) is not None:
        # A controller that takes the operation over needs to know the lease's guest.
        table = schema.operations
        connection.execute(update(table).where(table.c.id == id_).values(guest_uuid=uuid))
    lease = _locked(connection, database, resource)
    if lease["operation"] == id_:
        return Fence(resource=resource, token=lease["token"], operation=id_)
    _refuse_held(connection, lease, now)
    return _hand_over(connection, lease, id_, now)


def release(connection: Connection, fence: Fence) -> None:
    """Release a lease. Does nothing if another operation has acquired the lease meanwhile."""
    table = schema.leases
    ours = (table.c.resource == fence.resource, table.c.token == fence.token)
    connection.execute(update(table).where(*ours).values(operation=None))


def release_all(connection: Connection, id_: str) -> None:
    """Release all leases of an operation."""
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
    """Record that the controller `by` is alive for another `ttl` seconds.

    Raises LeaseLost if `by` is no longer the operation's controller, and JournalError.
    """
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
    """Make `by` the controller of an operation, and give the operation the guest's lease.

    The operation must be abandoned or delegated to agents. Returns the lease; None if the operation
    has no guest. Raises GuestLocked if the operation has ended, its controller is alive, another
    controller has already taken over, or another operation holds the guest's lease.
    """
    found = transactions.stored_operation(connection, operation.id, lock=True)
    if found is None or not found.active:
        outcome = "no longer exists" if found is None else f"has ended: {found.outcome}"
        raise GuestLocked(f"{operation.id} {outcome}; there is nothing to take over")
    time = connection.execute(select(now)).scalar_one()
    # This process gave up control of the operation, but could not record this.
    forgotten = found.controller == by and (found.alive_until or time) < time
    free = found.controller.entrusted or abandoned(found, time) or forgotten
    if found.controller != operation.controller or not free:
        controller = found.controller
        raise GuestLocked(
            f"{found.id} is run by process {controller.pid} on {controller.host}",
            hint=f"run vmckpt watch {found.id} to follow the job",
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
    """Give up control of an active operation. The operation keeps its lease and can be taken over.

    Raises LeaseLost if `by` is no longer the operation's controller, and JournalError.
    """
    transactions.guard(connection, id_, by=by)
    nobody = row_mapping.controlled_by(replace(by, pid=0, started=0))
    table = schema.operations
    connection.execute(update(table).where(table.c.id == id_).values(alive_until=0.0, **nobody))


def entrust(connection: Connection, id_: str, to: str, *, by: ControllerIdentity) -> None:
    """Delegate an operation to agents on hosts. The operation keeps its lease.

    `to`: the host or hosts, for messages. Raises LeaseLost if `by` is no longer the operation's
    controller, and JournalError.
    """
    transactions.guard(connection, id_, by=by)
    agents = row_mapping.controlled_by(ControllerIdentity(host=to, boot="", pid=0, started=0))
    table = schema.operations
    connection.execute(update(table).where(table.c.id == id_).values(alive_until=None, **agents))


def _locked(connection: Connection, database: Database, resource: str) -> RowMapping:
    """Return the row of a lease. The row stays locked until this transaction ends."""
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
    """Raise GuestLocked if an active operation holds the lease. The lease's row must be locked."""
    holder = lease["operation"] and transactions.stored_operation(connection, lease["operation"])
    if not holder or not holder.active:
        return
    what = "host" if guest_of(lease["resource"]) is None else "guest"
    if abandoned(holder, connection.execute(select(now)).scalar_one()):
        error = GuestLocked(
            f"{what} {holder.guest} is locked by the interrupted job {holder.id} ({holder.kind}),"
            f" started by {holder.asked_by} at {utc(holder.began_at)}",
            hint="run vmckpt recover",
        )
        error.interrupted = True
        raise error
    controller = holder.controller
    if controller.entrusted:
        raise GuestLocked(
            f"guest {holder.guest} is protected by job {holder.id}, run by agents on"
            f" {controller.host}",
            hint=f"run vmckpt unprotect {holder.guest} first",
        )
    raise GuestLocked(
        f"{what} {holder.guest} is locked by job {holder.id} ({holder.kind}), started by"
        f" {holder.asked_by} at {utc(holder.began_at)} and run by process {controller.pid} on"
        f" {controller.host}",
        hint=f"run vmckpt watch {holder.id} to follow the job, or vmckpt cancel {holder.id} to"
        " cancel the job; if its controller has died, run vmckpt recover",
    )
