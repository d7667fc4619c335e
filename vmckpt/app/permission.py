"""Decide whether the acting user may run a command.

The audit trail records refusals, and commands on stores and keys, which are no jobs.
"""

import logging
from collections.abc import Callable, Sequence

from vmckpt import inventory as inventories
from vmckpt.errors import BadInput, JournalError, NotPermitted, ReadOnly
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, location
from vmckpt.journal.audit_chain import What
from vmckpt.model.roles import NEEDS, NO_JOB, Role
from vmckpt.util import acting_user
from vmckpt.util.unicode_text import encodable

log = logging.getLogger("vmckpt.audit")


def require(
    inventory: Inventory, command: str, *, guest: str | None = None, names: Sequence[str] = ()
) -> None:
    """Check that a command that makes changes is allowed.

    `command`: a row of `roles.NEEDS`. `guest`, `names`: the guest, and the snapshots or keys, for
    the audit trail. Raises ReadOnly, and NotPermitted if the acting user lacks the role that the
    command needs.
    """
    inventory.may_act()
    require_role(inventory, command, guest=guest, names=names)


def require_role(
    inventory: Inventory, command: str, *, guest: str | None = None, names: Sequence[str] = ()
) -> None:
    """Like `require`, for a command that is also allowed in read-only mode. Raises NotPermitted."""
    _check(inventory, NEEDS[command], f"vmckpt {command}", guest)
    if not inventory.read_only:
        _record_start(command, names)


def require_view(inventory: Inventory) -> None:
    """Check that the acting user may use the inventory at all. Raises NotPermitted."""
    _check(inventory, Role.VIEW, "vmckpt with this inventory", None)


def require_if_known(
    inventory: Callable[[], Inventory], command: str, *, names: Sequence[str] = ()
) -> None:
    """Like `require`, for a command that needs no inventory.

    If there is no valid inventory, every user is allowed. Raises ReadOnly, NotPermitted.
    """
    try:
        known = inventory()
    except NotPermitted:
        raise
    except BadInput:
        inventories.may_act()
        _record_start(command, names)
    else:
        require(known, command, names=names)


def _check(inventory: Inventory, needed: Role, what: str, guest: str | None) -> None:
    if inventory.roles is None:
        return
    user = acting_user.acting_user()
    if not inventory.roles.lacks(user, needed):
        return
    why = f"{user.name} lacks the role {needed}"
    failed = _record(What.REFUSED, what, guest=guest, outcome=why)
    unrecorded = "" if failed is None else f"; the refusal was not recorded ({failed})"
    raise NotPermitted(
        f"user {user.name} may not run {what}: it needs the role {needed}; nothing was changed"
        f"{unrecorded}",
        hint=f"ask an administrator to add the user to roles: {needed} in {inventory.path}",
    )


def _record_start(command: str, names: Sequence[str]) -> None:
    """Record the start of a command that is no job.

    If the journal cannot be written, the command runs all the same, with a warning in the log: it
    may be needed to free the space that the journal lacks.
    """
    if command not in NO_JOB:
        return
    failed = _record(What.ALLOWED, " ".join(("vmckpt", command, *names)))
    if failed is not None:
        log.critical("vmckpt %s is not in the audit trail: %s", command, failed)


def _record(
    what: What, command: str, *, guest: str | None = None, outcome: str | None = None
) -> str | None:
    """Append an entry to the audit trail. Returns the error if that fails, otherwise None."""
    if location.default() == location.NONE:
        return None
    try:
        with jobs.open_journal() as journal:
            journal.audit_command(
                what, encodable(command), guest=guest and encodable(guest), outcome=outcome
            )
    except JournalError as exc:
        return exc.message
    except ReadOnly:
        return "read-only mode"
    return None
