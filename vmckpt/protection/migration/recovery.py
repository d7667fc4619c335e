"""Recover an orphaned migration by epochs: undo it, or finish it after the handover."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import StepState, StoredStep
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.protection import agent_client
from vmckpt.protection.agent_status import ProtectionStatus
from vmckpt.protection.migration import finish
from vmckpt.protection.migration.finish import Pair
from vmckpt.protection.steps import Step


def begun(steps: Sequence[StoredStep]) -> StoredStep | None:
    """Return the step of the attempt that has not ended; None if there is none."""
    found = [one for one in steps if one.name == Step.PROTECT and one.state is StepState.INTENDED]
    return found[-1] if found else None


async def settle(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Undo or finish an orphaned migration by epochs, as recovery.Handler describes.

    Raises VmckptError.
    """
    del policies
    step = begun(case.steps)
    if step is None:
        return case.ended(Settled(truth="the migration had not begun", outcome=Outcome.FAILED))
    operation = case.operation
    pair = Pair(
        guest=operation.guest, uuid=operation.guest_uuid or "", source=case.host,
        target=case.inventory.host(operation.target or ""), session=str(step.intent["session"]),
    )  # fmt: skip
    ours, theirs = await asyncio.gather(
        agent_client.status(pair.source, pair.uuid), agent_client.status(pair.target, pair.uuid)
    )
    found = truth(pair, _of(pair, ours), _of(pair, theirs))
    if case.dry or found.outcome is None:
        return found
    warnings: list[str] = []
    if found.outcome is Outcome.COMPLETED:
        arrived = await finish.finish(pair, warnings.append) is not None
    else:
        # The source may have handed the guest over since it was queried.
        arrived = await finish.call_off(pair, warnings.append) is not None
    if arrived is not (found.outcome is Outcome.COMPLETED):
        said = f"is running on {pair.target.name}" if arrived else f"never left {pair.source.name}"
        outcome = Outcome.COMPLETED if arrived else Outcome.FAILED
        found = replace(found, truth=f"{pair.guest} {said}", outcome=outcome)
    return case.ended(replace(found, warnings=tuple(warnings)))


def _of(pair: Pair, told: ProtectionStatus) -> ProtectionStatus:
    """Return what a host reports of this migration, ignoring any other protection of the guest."""
    if told.error is not None or told.session == pair.session:
        return told
    return ProtectionStatus(runs=bool(told.runs) and told.role is None)


def truth(pair: Pair, ours: ProtectionStatus, theirs: ProtectionStatus) -> Settled:
    """Determine the state of the migration from the answers of both agents. Pure."""
    guest, source, target = pair.guest, pair.source.name, pair.target.name
    if finish.has_arrived(theirs):
        return Settled(
            truth=f"{guest} is running on {target}", outcome=Outcome.COMPLETED,
            did=("clean up after the migration",),
        )  # fmt: skip
    silent = [name for name, one in ((source, ours), (target, theirs)) if one.error is not None]
    if silent:
        return Settled(
            truth=f"{guest} was moving to {target}, and {' and '.join(silent)} cannot be queried",
            outcome=None,
            settle=f"run vmckpt doctor {' '.join(silent)}, fix the problems, then run vmckpt"
            " recover",
        )
    if finish.is_given(ours):
        return _given(pair, theirs)
    did = ("remove the standby", "define the guest again")
    if ours.runs:
        return Settled(truth=f"{guest} never left {source}", outcome=Outcome.FAILED, did=did)
    if ours.role or theirs.role:
        why = ours.stopped_because(source, "migration")
        return Settled(truth=f"{guest} has stopped: {why}", outcome=Outcome.SHUT_OFF, did=did)
    return Settled(
        truth=f"{guest} is running on neither host, and no part of its migration is left",
        outcome=Outcome.SHUT_OFF, did=("define the guest again if its definition is missing",),
    )  # fmt: skip


def _given(pair: Pair, theirs: ProtectionStatus) -> Settled:
    guest, source, target = pair.guest, pair.source.name, pair.target.name
    if finish.never_ran(theirs):
        return Settled(
            truth=f"{target} could not run {guest}, which is paused on {source}",
            outcome=Outcome.FAILED,
            did=(f"resume the guest on {source}", "remove the standby"),
        )  # fmt: skip
    if theirs.role == "backup":
        return Settled(
            truth=f"{source} has handed {guest} over to {target}", outcome=Outcome.COMPLETED,
            did=(f"run the guest on {target}", "clean up after the migration"),
        )  # fmt: skip
    return Settled(
        truth=f"{source} has handed {guest} over to {target}, which has no record of the migration",
        outcome=None,
        settle=f"look for the guest on {target}; its definition is in {pair.state} on {source}",
    )
