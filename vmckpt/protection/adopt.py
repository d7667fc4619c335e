"""A protection that the journal does not know, because the journal was lost: its agents still have
it on both hosts, and what they say is written down anew, so that it can be ended."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vmckpt.errors import BadInput, GuestLocked
from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import JournalStepLog, recorded
from vmckpt.journal.records import NewOperation
from vmckpt.policy.model import Protection
from vmckpt.protection import active, agent_client
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.request import Judge
from vmckpt.protection.steps import Step
from vmckpt.protection.stop import Known

_DOCS = "see docs/recovery.md, A damaged journal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A protection as hosts have it."""

    session: str
    primary: str
    backup: str
    has_lease: bool


def decide(guest: str, told: Mapping[str, ProtectionStatus], *, dead: bool) -> Found:
    """Say which protection of a guest the hosts have, by their answers. Pure.

    `dead`: a person says that the guest's host is off; else it must answer, since the standby may
    be all that is left. Raises BadInput, GuestLocked.
    """
    sides = {name: one for name, one in told.items() if one.role and one.session}
    silent = sorted(name for name, one in told.items() if one.error is not None)
    if not sides:
        unknown = f"; {' and '.join(silent)} cannot be asked" if silent else ""
        raise BadInput(f"{guest} is not protected{unknown}", hint="vmckpt status lists them")
    if any(one.moves is not False for one in sides.values()):
        raise GuestLocked(
            f"{guest} is being moved by epochs, or was protected by an older release, and the"
            " journal does not know of it",
            hint=_DOCS,
        )
    found = {_found(name, one) for name, one in sides.items()}
    if len(found) > 1:
        raise GuestLocked(
            f"{' and '.join(sorted(sides))} have different protections of {guest}, which the"
            " journal does not know",
            hint=_DOCS,
        )
    (only,) = found
    if only.primary in silent and not dead:
        raise GuestLocked(
            f"{guest} is protected by what {only.backup} says, and {only.primary}, where it may"
            " run, cannot be asked",
            hint=f"mend {only.primary}; if it is off, vmckpt failover {guest} --host-is-off"
            " --lost-journal",
        )
    return only


def _found(name: str, told: ProtectionStatus) -> Found:
    """What one side says."""
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
    """Write a protection down that only its hosts know. Raises VmckptError as `decide`, and
    InventoryError, GuestLocked, JournalError."""
    found = decide(guest, await agent_client.both(inventory.hosts, uuid), dead=dead)
    primary, backup = inventory.host(found.primary), inventory.host(found.backup)
    warn(
        f"the journal does not know that {guest} is protected; {primary.name} and {backup.name} do,"
        " and that is written down"
    )
    # It is unknown whether a service was to keep watch: a person decides.
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
        raise BadInput(f"{guest} cannot be ended without a journal", hint="name one in --journal")
    return known
