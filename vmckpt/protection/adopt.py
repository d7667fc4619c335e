"""Adopt a protection whose journal record is lost while its agents are still running.

The protection is recorded again as its agents report it, so that it can be stopped.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vmckpt.errors import BadInput, GuestLocked, some
from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import JournalStepLog, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.policy.model import Protection
from vmckpt.protection import active, agent_client
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.request import Judge
from vmckpt.protection.steps import Step
from vmckpt.protection.stop import Known

_DOCS = 'see "A damaged journal" in docs/recovery.md'


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A protection as its hosts describe it."""

    session: str
    primary: str
    backup: str
    has_lease: bool


def decide(guest: str, told: Mapping[str, ProtectionStatus], *, dead: bool) -> Found:
    """Determine a guest's protection from the hosts' answers, `told`. Pure.

    `dead`: the operator states that the guest's host is off. Otherwise that host must answer, since
    the standby may be the guest's only copy. Raises BadInput if the guest is not protected, and
    GuestLocked if it is being migrated, or the answers are contradictory or not sufficient.
    """
    sides = {name: one for name, one in told.items() if one.role and one.session}
    silent = sorted(name for name, one in told.items() if one.error is not None)
    if not sides:
        unknown = f"; {some(silent)} cannot be queried" if silent else ""
        raise BadInput(f"{guest} is not protected{unknown}", hint="run vmckpt status")
    if any(one.moves is not False for one in sides.values()):
        raise GuestLocked(
            f"{guest} is being migrated in mode checkpoint, or was protected by an older release,"
            " and the journal has no record of it",
            hint=_DOCS,
        )
    found = {_found(name, one) for name, one in sides.items()}
    if len(found) > 1:
        raise GuestLocked(
            f"{' and '.join(sorted(sides))} report different protections of {guest}, and the"
            " journal has no record of either",
            hint=_DOCS,
        )
    (only,) = found
    if only.primary in silent and not dead:
        raise GuestLocked(
            f"{guest} may be running on {only.primary}, which cannot be queried; its standby is on"
            f" {only.backup}",
            hint=f"run vmckpt doctor {only.primary}; if {only.primary} is off, run vmckpt failover"
            f" {guest} --host-is-off --lost-journal",
        )
    return only


def _found(name: str, told: ProtectionStatus) -> Found:
    """Return the protection that a single host describes."""
    here, there = name, str(told.peer)
    if told.role == "backup":
        here, there = there, here
    return Found(
        session=str(told.session), primary=here, backup=there,
        has_lease=told.has_lease,
    )  # fmt: skip


async def adopt(
    inventory: Inventory, guest: str, uuid: str, warn: Callable[[str], None], *, dead: bool = False
) -> Known:
    """Record in the journal a protection that only its hosts know about, and return it.

    `dead`: see `decide`. Raises the errors of `decide`, BadInput without a journal, InventoryError,
    GuestLocked, JournalError, VmckptError.
    """
    found = decide(guest, await agent_client.both(inventory.hosts, uuid), dead=dead)
    primary, backup = inventory.host(found.primary), inventory.host(found.backup)
    warn(
        f"the journal has no record of {guest}'s protection; recording it as its agents"
        f" report it, from {primary.name} to {backup.name}"
    )
    # It is unknown whether vmckpt run was to decide about failovers, so the operator decides.
    judge = Judge.LEASE if found.has_lease else Judge.PERSON
    new = NewOperation(
        kind=active.KIND, guest=guest, guest_uuid=uuid, source=primary.name,
        target=backup.name,
        detail={
            "automatic": found.has_lease, "judge": str(judge), "terms": Protection().as_json(),
            "adopted": True,
        },
    )  # fmt: skip
    async with recorded(new, uuid, warn) as recorder:
        meant = {
            "session": found.session, "primary": primary.name, "backup": backup.name,
            "lease": found.has_lease, "images": {},
        }  # fmt: skip
        await JournalStepLog(recorder).intend(Step.PROTECT, meant)
        recorder.entrust(primary.name)
    known = await asyncio.to_thread(active.find, inventory, uuid)
    if known is None:
        raise BadInput(
            f"{guest}: there is no journal in which to record the protection",
            hint="name a journal with --journal",
        )
    return known
