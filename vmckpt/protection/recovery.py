"""A protection without a controller: its agents go on by themselves; what has ended is tidied."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from vmckpt.journal.recorder import OrphanedJob, Recorder
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.protection import agent_client, solo_permission, stop
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.copies import second_copy
from vmckpt.protection.steps import READY, Step
from vmckpt.protection.stop import Known
from vmckpt.replication.session import ProtectionOutcome


async def settle(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """See recovery.Handler."""
    del policies
    begun = case.step(Step.PROTECT)
    if begun is None:
        return case.ended(Settled(truth="it had not begun", outcome=Outcome.FAILED))
    known = Known(
        operation=case.operation,
        primary=case.host,
        backup=case.inventory.host(case.operation.target or ""),
        lease=case.inventory.lease if begun.intent.get("lease") else None,
        session=str(begun.intent["session"]),
    )
    ours, theirs = await asyncio.gather(
        agent_client.status(known.primary, known.uuid),
        agent_client.status(known.backup, known.uuid),
    )
    found = truth(known, ours, theirs)
    name = ours.wants_leave
    if name and found.outcome is None:
        return await _let_alone(known, case.recorder, str(name))
    found = _with_agents(known, found, ours, theirs)
    if case.dry:
        return found
    if found.outcome is None:
        if case.recorder is not None:
            if ours.phase == READY:  # who began it may have died before
                case.recorder.update(phase=READY)
            case.recorder.entrust(known.primary.name)
        return replace(found, did=await _revived(known, ours, theirs))
    if stop.is_backups(ours, theirs):
        await stop.tidy(known)
        found = replace(found, two_copies=False)  # one is ended, or that was refused
        return case.ended(found, failed_over=known.backup.name)
    await stop.put_back(known)
    return case.ended(found)


def _with_agents(
    known: Known, found: Settled, ours: ProtectionStatus, theirs: ProtectionStatus
) -> Settled:
    """The same, with what is done about agents that are gone. Pure."""
    sides = ((known.primary, ours), (known.backup, theirs))
    gone = [host.name for host, told in sides if is_abandoned(told)]
    if found.outcome is not None or not gone:
        return found
    settle = f"vmckpt recover starts its agent on {' and on '.join(gone)} again"
    return replace(found, goes_on=True, settle=settle)


async def _revived(
    known: Known, ours: ProtectionStatus, theirs: ProtectionStatus
) -> tuple[str, ...]:
    """Start agents that nothing starts again: their watchdogs are gone, too. Raises VmckptError."""
    did: list[str] = []
    for host, told in ((known.backup, theirs), (known.primary, ours)):
        if is_abandoned(told):
            done = await agent_client.order(host, known.uuid, "revive", owner=known.session)
            did += done["did"]
    return tuple(did)


def is_abandoned(told: ProtectionStatus) -> bool:
    """Whether a QEMU of the protection has no agent, by what its host says. Pure."""
    return bool(told.runs) and told.agent is False and told.outcome is None


async def _let_alone(known: Known, recorder: Recorder | None, name: str) -> Settled:
    """Its output waits for a backup that is away, and nobody keeps watch. Without a recorder it is
    only said. Raises VmckptError."""
    guest, backup = known.operation.guest, known.backup.name
    if recorder is None:
        return Settled(
            truth=f"what {guest} sends waits for {backup}, which is away", outcome=None,
            goes_on=True, settle="vmckpt recover lets it go on alone",
        )  # fmt: skip
    await solo_permission.note(recorder, known.operation.id, f"{backup} was away")
    await solo_permission.grant(known.primary, known.uuid, name)
    recorder.entrust(known.primary.name)
    return Settled(
        truth=f"what {guest} sent waited for {backup}, which is away; it goes on alone now",
        outcome=None, goes_on=True, settle="keep vmckpt run running, and it need not wait",
    )  # fmt: skip


def truth(known: Known, ours: ProtectionStatus, theirs: ProtectionStatus) -> Settled:
    """What is true by what both agents say. Pure."""
    primary, backup, guest = known.primary.name, known.backup.name, known.operation.guest
    found = _taken_over(known, ours, theirs)
    if (second := second_copy(ours, theirs, primary)) is not None:
        found = _with_second(known, found, second)
    if found is not None:
        return found
    silent = [name for name, one in ((primary, ours), (backup, theirs)) if one.error is not None]
    if silent:
        return Settled(
            truth=f"{guest} is protected, and {' and '.join(silent)} cannot be asked",
            outcome=None,
            settle=f"mend {silent[0]}; or vmckpt failover {guest}, if it is lost",
        )
    waits = theirs.role is not None and theirs.outcome is None
    if ours.outcome == ProtectionOutcome.ENDED:
        return Settled(
            truth=f"{guest} was ended on {primary} by somebody's wish", outcome=Outcome.COMPLETED,
            did=("remove its standby", "store its definition again"),
        )  # fmt: skip
    if waits and ours.runs and ours.role:
        return Settled(
            truth=f"{guest} is protected: {_phase(ours)}",
            outcome=None,
            goes_on=True,
            settle="its agents go on with it",
        )
    if waits and not ours.runs:
        # Its host may have been started anew: then the standby has the newest that there is.
        why = ours.why or f"{primary} knows nothing of it"
        return Settled(
            truth=f"{guest} waits on {backup}: {why}",
            outcome=None,
            settle=f"vmckpt failover {guest} runs it there, vmckpt unprotect {guest} gives that up",
        )
    if ours.runs and (ours.role or waits):
        left = f"a standby is left on {backup}" if waits else "its standby is gone"
        return Settled(
            truth=f"{guest} runs on {primary}, and {left}", outcome=Outcome.FAILED,
            did=("end its protection",),
        )  # fmt: skip
    if theirs.role or ours.outcome:
        why = ours.why or theirs.why or "nobody knows why"
        return Settled(
            truth=f"no agents of {guest} are left, and no standby: {why}", outcome=Outcome.FAILED,
            did=("put back what its protection set",),
        )  # fmt: skip
    return Settled(
        truth=f"{guest} is not protected any more: neither host has anything of it left",
        outcome=Outcome.COMPLETED,
        did=("put back what its protection set",),
    )  # fmt: skip


def _with_second(known: Known, found: Settled | None, why: str) -> Settled:
    """What is true, and what is done, if the guest still runs on its former host as well."""
    primary, backup = known.primary.name, known.backup.name
    if found is None or found.outcome is None:
        return Settled(
            truth=f"{known.operation.guest} runs on {primary}, and {why}", outcome=None,
            settle=f"mend {backup}, so that it can say whether the guest runs there",
            two_copies=True,
        )  # fmt: skip
    return replace(
        found, truth=f"{found.truth}; a second copy runs on {primary}", two_copies=True,
        did=(f"end the copy on {primary}, if nothing of it was heard outside", *found.did),
    )  # fmt: skip


def _taken_over(known: Known, ours: ProtectionStatus, theirs: ProtectionStatus) -> Settled | None:
    """The guest is the backup's, or may be."""
    backup, guest = known.backup.name, known.operation.guest
    if theirs.outcome == ProtectionOutcome.FAILED_OVER:
        return Settled(
            truth=f"{guest} runs on {backup}: {theirs.why}", outcome=Outcome.COMPLETED,
            did=("remove what was left of its protection",),
        )  # fmt: skip
    if stop.is_backups(ours, theirs):
        return Settled(
            truth=f"{guest} took over on {backup}, which was started anew since",
            outcome=Outcome.COMPLETED, did=("remove what was left of its protection",),
        )  # fmt: skip
    if stop.is_unclear(ours, theirs):
        return Settled(
            truth=f"{guest} may have taken over on {backup}, whose libvirt does not answer",
            outcome=None, settle=f"mend it there; see vmckpt doctor {backup}",
        )  # fmt: skip
    return None


def _phase(ours: ProtectionStatus) -> str:
    return str(ours.phase or "its agent is started again")
