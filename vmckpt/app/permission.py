"""Decide whether the acting user may run a command. Refusals are recorded in the audit trail."""

from collections.abc import Callable

from vmckpt import inventory as inventories
from vmckpt.errors import BadInput, JournalError, NotPermitted
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, location
from vmckpt.model.roles import NEEDS, ActingUser, Role
from vmckpt.util import acting_user


def require(inventory: Inventory, command: str, *, guest: str | None = None) -> None:
    """Check that a command that makes changes is allowed.

    `command`: a row of `roles.NEEDS`. `guest`: for the audit trail. Raises ReadOnly, and
    NotPermitted if the acting user lacks the role that the command needs.
    """
    inventory.may_act()
    require_role(inventory, command, guest=guest)


def require_role(inventory: Inventory, command: str, *, guest: str | None = None) -> None:
    """Like `require`, for a command that is also allowed in read-only mode."""
    if inventory.roles is None:
        return
    _check(inventory, NEEDS[command], f"vmckpt {command}", guest)


def require_view(inventory: Inventory) -> None:
    """Check that the acting user may use the inventory at all. Raises NotPermitted."""
    if inventory.roles is not None:
        _check(inventory, Role.VIEW, "vmckpt with this inventory", None)


def require_if_known(inventory: Callable[[], Inventory], command: str) -> None:
    """Like `require`, for a command that needs no inventory.

    If there is no valid inventory, every user is allowed. Raises ReadOnly, NotPermitted.
    """
    try:
        known = inventory()
    except NotPermitted:
        raise
    except BadInput:
        inventories.may_act()
    else:
        require(known, command)


def _check(inventory: Inventory, needed: Role, what: str, guest: str | None) -> None:
    user = acting_user.acting_user()
    if inventory.roles is None or not inventory.roles.lacks(user, needed):
        return
    unrecorded = _record(user, needed, what, guest)
    raise NotPermitted(
        f"user {user.name} may not run {what}: it needs the role {needed}; nothing was changed"
        f"{unrecorded}",
        hint=f"ask an administrator to add the user to roles: {needed} in {inventory.path}",
    )


def _record(user: ActingUser, needed: Role, what: str, guest: str | None) -> str:
    """Record a refusal in the audit trail. Returns a text for the error if that fails."""
    if location.default() == location.NONE:
        return ""
    try:
        with jobs.open_journal() as journal:
            journal.refused(what, f"{user.name} lacks the role {needed}", guest=guest)
    except JournalError as exc:
        return f"; the refusal was not recorded ({exc.message})"
    except BadInput:  # read-only mode
        return "; the refusal was not recorded (read-only mode)"
    return ""
