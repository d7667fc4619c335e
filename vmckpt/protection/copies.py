"""Detect a second copy of a protected guest in the answers of both agents. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from vmckpt.model.guest import Copies
from vmckpt.protection import status
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer

LEASE_HOLDER = "lease_holder"
"""Key in the answer of a primary without an agent: the host that holds the guest's lease."""


def of_protections(entries: Iterable[Mapping[str, Any]]) -> tuple[Copies, ...]:
    """Return the second copies found in `entries`, the results of `app.protection.job_status`."""
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
    """Return why the primary's copy is a second copy; None if there is no evidence that it is.

    `ours`: the primary's answer, which must not be older than the backup's answer, `theirs`.
    """
    if not ours.runs or ours.role == "backup":
        return None
    if status.has_taken_over(theirs) and theirs.runs is not False:
        return "its standby has taken over, but its QEMU on the primary is still running"
    holder = ours.lease_holder
    if holder is not None and holder != primary:
        return f"{holder} holds its lease"
    return None
