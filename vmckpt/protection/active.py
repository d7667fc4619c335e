"""Protections as the journal records them."""

from vmckpt.errors import BadInput
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, location
from vmckpt.journal.records import Operation
from vmckpt.protection.steps import Step
from vmckpt.protection.stop import Known

KIND = "protect"


def active() -> list[Operation]:
    """Return all active protections; an empty list without a journal. Raises JournalError."""
    if location.default() == location.NONE:
        return []
    with jobs.open_journal() as journal:
        return [one for one in journal.operations(active=True) if one.kind == KIND]


def unattended() -> list[Operation]:
    """Return the protections without a live controller, which only their agents run.

    Returns an empty list without a journal. Raises JournalError.
    """
    if location.default() == location.NONE:
        return []
    with jobs.open_journal() as journal:
        return [
            one
            for one in (*journal.delegated_to_agents(), *journal.abandoned())
            if one.kind == KIND
        ]


def of(inventory: Inventory, guest: str) -> Known:
    """Return the protection of a guest, given by name or UUID.

    Raises BadInput if the guest is not protected, InventoryError, JournalError.
    """
    found = find(inventory, guest)
    if found is None:
        raise BadInput(f"{guest} is not protected", hint="run vmckpt status")
    return found


def find(inventory: Inventory, guest: str) -> Known | None:
    """Return the protection of a guest, given by name or UUID; None if it is not protected.

    Raises InventoryError, JournalError.
    """
    found = [one for one in active() if guest in (one.guest, one.guest_uuid)]
    return known(inventory, found[0]) if found else None


def known(inventory: Inventory, operation: Operation) -> Known:
    """Return a protection with its hosts, lease and session.

    Raises InventoryError, JournalError.
    """
    with jobs.open_journal() as journal:
        steps = journal.steps(operation.id)
    begun = next((step for step in steps if step.name == Step.PROTECT), None)
    has_lease = begun is not None and bool(begun.intent.get("lease"))
    return Known(
        operation=operation, primary=inventory.host(operation.source or ""),
        backup=inventory.host(operation.target or ""),
        lease=inventory.lease if has_lease else None,
        session=None if begun is None else str(begun.intent["session"]),
    )  # fmt: skip
