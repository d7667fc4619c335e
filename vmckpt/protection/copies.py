"""Whether a protected guest has two copies, by what both agents say. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from vmckpt.model.guest import Copies
from vmckpt.protection import status
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer

LEASE_HOLDER = "lease_holder"
"""What a primary without an agent tells of its guest's lease: the host that holds it."""


def of_protections(entries: Iterable[Mapping[str, Any]]) -> tuple[Copies, ...]:
    """Of entries as `app.protection.job_status` makes them."""
    found = (_of_protection(one) for one in entries)
    return tuple(one for one in found if one is not None)


def _of_protection(entry: Mapping[str, Any]) -> Copies | None:
    primary, backup = str(entry["primary"]), str(entry["backup"])
    says = entry["says"]
    why = second_copy(
        parse_answer(says.get(primary) or {}), parse_answer(says.get(backup) or {}), primary
    )
    if why is None:
        return None
    return Copies(
        guest=str(entry["guest"]), uuid=str(entry["uuid"]), hosts=(primary, backup), why=why
    )


def second_copy(ours: ProtectionStatus, theirs: ProtectionStatus, primary: str) -> str | None:
    """Why the copy on the primary is one too many; None: it is not, for all that is known.

    What the primary says must not be older than what the backup says.
    """
    if not ours.runs or ours.role == "backup":
        return None
    if status.has_taken_over(theirs) and theirs.runs is not False:
        return "its standby has taken over, and its QEMU on the primary was not ended"
    holder = ours.lease_holder
    if holder is not None and holder != primary:
        return f"{holder} holds its lease"
    return None
