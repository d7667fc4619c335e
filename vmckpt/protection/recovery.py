"""Recover an orphaned protection.

The agents of a protection run without a controller, so recovery only restarts agents that are gone,
and cleans up after a protection that has ended.
"""

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
    """Recover an orphaned protection, as recovery.Handler describes. Raises VmckptError."""
    del policies
    begun = case.step(Step.PROTECT)
    if begun is None:
        return case.ended(Settled(truth="the protection had not begun", outcome=Outcome.FAILED))
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
            if ours.phase == READY:  # its controller may have died before it recorded this
                case.recorder.update(phase=READY)
            case.recorder.entrust(known.primary.name)
        return replace(found, did=await _revived(known, ours, theirs))
    if stop.is_backups(ours, theirs):
        await stop.tidy(known)
        found = replace(found, two_copies=False)  # one copy was killed, or tidy() has raised
        return case.ended(found, failed_over=known.backup.name)
    await stop.put_back(known)
    return case.ended(found)


def _with_agents(
    known: Known, found: Settled, ours: ProtectionStatus, theirs: ProtectionStatus
) -> Settled:
    """Return `found`, extended by what recovery does about missing agents. Pure."""
    sides = ((known.primary, ours), (known.backup, theirs))
    gone = [host.name for host, told in sides if is_abandoned(told)]
    if found.outcome is not None or not gone:
        return found
    settle = f"run vmckpt recover to restart its agent on {' and on '.join(gone)}"
    return replace(found, goes_on=True, settle=settle)


async def _revived(
    known: Known, ours: ProtectionStatus, theirs: ProtectionStatus
) -> tuple[str, ...]:
    """Restart agents that are gone and have no watchdog to restart them. Returns what was done.

    Raises VmckptError.
    """
    did: list[str] = []
    for host, told in ((known.backup, theirs), (known.primary, ours)):
        if is_abandoned(told):
            done = await agent_client.order(host, known.uuid, "revive", owner=known.session)
            did += done["did"]
    return tuple(did)


def is_abandoned(told: ProtectionStatus) -> bool:
    """Return whether a host runs a QEMU of the protection without an agent. Pure."""
    return bool(told.runs) and told.agent is False and told.outcome is None


async def _let_alone(known: Known, recorder: Recorder | None, name: str) -> Settled:
    """Permit a guest to run unprotected, whose output is waiting for an unreachable backup.

    This is needed only if `vmckpt run` is not running. Without a recorder, only the state is
    described. Raises VmckptError.
    """
    guest, backup = known.operation.guest, known.backup.name
    if recorder is None:
        return Settled(
            truth=f"the output of {guest} is waiting for {backup}, which is unreachable",
            outcome=None, goes_on=True,
            settle="run vmckpt recover to permit the guest to run unprotected",
        )  # fmt: skip
    await solo_permission.note(recorder, known.operation.id, f"{backup} was unreachable")
    await solo_permission.grant(known.primary, known.uuid, name)
    recorder.entrust(known.primary.name)
    return Settled(
        truth=f"{backup} is unreachable; {guest}, whose output was waiting for it, now runs"
        " unprotected",
        outcome=None, goes_on=True,
        settle="start vmckpt run and keep it running, so that guests may run unprotected without"
        " vmckpt recover",
    )  # fmt: skip


def truth(known: Known, ours: ProtectionStatus, theirs: ProtectionStatus) -> Settled:
    """Determine the state of a protection from the answers of both agents. Pure."""
    primary, backup, guest = known.primary.name, known.backup.name, known.operation.guest
    found = _taken_over(known, ours, theirs)
    if (second := second_copy(ours, theirs, primary)) is not None:
        found = _with_second(known, found, second)
    if found is not None:
        return found
    silent = [name for name, one in ((primary, ours), (backup, theirs)) if one.error is not None]
    if silent:
        return Settled(
            truth=f"{guest} is protected, but {' and '.join(silent)} cannot be queried",
            outcome=None,
            settle=f"run vmckpt doctor {' '.join(silent)}; if {primary} is lost, run vmckpt"
            f" failover {guest}",
        )
    waits = theirs.role is not None and theirs.outcome is None
    if ours.outcome == ProtectionOutcome.ENDED:
        return Settled(
            truth=f"{guest} shut down, panicked or was stopped on request on {primary}",
            outcome=Outcome.COMPLETED, did=("remove the standby", "define the guest again"),
        )  # fmt: skip
    if waits and ours.runs and ours.role:
        return Settled(
            truth=f"{guest} is protected: {_phase(ours)}",
            outcome=None,
            goes_on=True,
            settle="vmckpt's agents keep running; nothing to do",
        )
    if waits and not ours.runs:
        # If the primary has restarted, the standby has the newest state of the guest.
        why = ours.stopped_because(primary, "protection")
        return Settled(
            truth=f"the standby of {guest} on {backup} is waiting: {why}",
            outcome=None,
            settle=f"run the standby with vmckpt failover {guest}, or discard it with vmckpt"
            f" unprotect {guest}",
        )
    if ours.runs and (ours.role or waits):
        left = f"a standby is left on {backup}" if waits else "its standby is gone"
        return Settled(
            truth=f"{guest} is running on {primary}, and {left}", outcome=Outcome.FAILED,
            did=("end the protection",),
        )  # fmt: skip
    if theirs.role or ours.outcome:
        why = ours.why or theirs.why or "the reason is unknown"
        return Settled(
            truth=f"{guest} no longer has agents or a standby: {why}",
            outcome=Outcome.FAILED, did=("restore the settings that its protection changed",),
        )  # fmt: skip
    return Settled(
        truth=f"{guest} is no longer protected: neither host has any part of the protection",
        outcome=Outcome.COMPLETED,
        did=("restore the settings that its protection changed",),
    )  # fmt: skip


def _with_second(known: Known, found: Settled | None, why: str) -> Settled:
    """Return `found`, extended for a guest that is also running on its former host."""
    primary, backup = known.primary.name, known.backup.name
    if found is None or found.outcome is None:
        return Settled(
            truth=f"{known.operation.guest} is running on {primary}, and {why}", outcome=None,
            settle=f"run vmckpt doctor {backup} and fix the problems, so that {backup} reports"
            " whether the guest is running there; then run vmckpt recover",
            two_copies=True,
        )  # fmt: skip
    return replace(
        found, truth=f"{found.truth}; a second copy is running on {primary}", two_copies=True,
        did=(f"kill the copy on {primary} if none of its output was released", *found.did),
    )  # fmt: skip


def _taken_over(known: Known, ours: ProtectionStatus, theirs: ProtectionStatus) -> Settled | None:
    """Return the state if the guest has failed over to the backup, or may have; else None."""
    backup, guest = known.backup.name, known.operation.guest
    if theirs.outcome == ProtectionOutcome.FAILED_OVER:
        return Settled(
            truth=f"{guest} is running on {backup}: {theirs.why}", outcome=Outcome.COMPLETED,
            did=("clean up after its protection",),
        )  # fmt: skip
    if stop.is_backups(ours, theirs):
        return Settled(
            truth=f"{guest} failed over to {backup}, which has since restarted",
            outcome=Outcome.COMPLETED, did=("clean up after its protection",),
        )  # fmt: skip
    if stop.is_unclear(ours, theirs):
        return Settled(
            truth=f"{guest} may have failed over to {backup}, whose libvirt does not answer",
            outcome=None, settle=f"fix libvirt on that host: run vmckpt doctor {backup}",
        )  # fmt: skip
    return None


def _phase(ours: ProtectionStatus) -> str:
    return str(ours.phase or "vmckpt's agent is restarting")
