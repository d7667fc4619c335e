"""Recover orphaned operations: snapshots, guards, boot tests, forks, the scheduler."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vmckpt.agent import client
from vmckpt.agent.cleanup_orders import FinishOrder
from vmckpt.agent.orders import PutBackOrder, UnrestoreOrder
from vmckpt.agent.restore.leftovers import LeftoverDecision
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import StoredStep
from vmckpt.model.disk import StorePlace
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.snapshot import prepare
from vmckpt.snapshot.guard_rules import way_back
from vmckpt.snapshot.request import Step
from vmckpt.units import show_count

_NEVER = Settled(truth="the operation had not started", outcome=Outcome.FAILED)


async def settle(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover an orphaned snapshot; see recovery.Handler."""
    del policies
    begun = case.step(Step.TAKE)
    told = _NEVER
    if begun is not None:
        order = _order(case, begun)
        found = await _asked(case, order)
        told = snapshot_verdict(published=bool(found["published"]))
    return case.ended(told)


async def settle_restore(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover an orphaned restore; see recovery.Handler."""
    del policies
    begun = case.step(Step.RESTORE)
    told = _NEVER
    if begun is not None:
        order = _unrestore(case, begun)
        found = await _asked(case, order)
        hook = begun.intent.get("on_restore")
        told = came_back(
            LeftoverDecision(found["verdict"]),
            memory=order.memory,
            why=str(found["why"]),
            did=[str(one) for one in found["did"]],
            left=[str(one) for one in found["left"]],
            hook=None if hook is None else str(hook),
            ran=any(one.name == Step.HOOK for one in case.steps),
            stands=bool(begun.intent.get("stands")),
        )
        if begun.intent.get("lazy") and told.outcome is not None:
            finish = FinishOrder(
                guest=order.guest, host=case.host.name, dry=case.dry or not case.adopt
            )
            rest = await _asked(case, finish)
            told = came_in(told, waits=bool(rest["waits"]), whole=bool(rest["whole"]))
    return case.ended(told)


async def _asked(
    case: OrphanedJob, order: PutBackOrder | UnrestoreOrder | FinishOrder
) -> dict[str, Any]:
    """Send an order to an agent on the operation's host. Returns the agent's answer."""
    return await client.run_order(case.host, order.as_json(), case.caller.emit, asyncio.Event())


def _unrestore(case: OrphanedJob, begun: StoredStep) -> UnrestoreOrder:
    step = case.step(Step.MAKE_WAY)
    way = None if step is None else step.intent
    return UnrestoreOrder(
        guest=case.operation.guest_uuid or "",
        uri=client.LIBVIRT,
        host=case.host.name,
        state=str(begun.intent["state"]),
        snapshot=str(begun.intent["snapshot"]),
        images=dict(begun.intent["images"]),
        made=None if way is None else dict(way["made"]),
        empty=() if way is None else tuple(way["empty"]),
        memory=bool(begun.intent.get("memory", True)),
        dry=case.dry,
    )


def came_back(
    verdict: LeftoverDecision,
    *,
    memory: bool = True,
    why: str = "",
    did: Sequence[str] = (),
    left: Sequence[str] = (),
    hook: str | None = None,
    ran: bool = False,
    stands: bool = False,
) -> Settled:
    """Return the result of an orphaned restore. Pure.

    `memory`: whether it was meant to start the guest; `ran`: whether its hook had started;
    `stands`: whether the guest was to stay paused until all guests of its group were restored.
    """
    if verdict is LeftoverDecision.ARRIVED:
        done = "may not have finished" if ran else "was not run"
        follows = "" if hook is None else f"; its on_restore hook {done}: {hook}"
        truth = "the guest was restored" if memory else "the guest's disks were restored"
        if stands:
            truth += (
                " and may be paused; run virsh resume GUEST when all guests of its group are"
                " restored"
            )
        return Settled(truth=f"{truth}{follows}", outcome=Outcome.COMPLETED, did=tuple(did))
    if verdict is LeftoverDecision.BACK:
        truth = "the guest was not started" if memory else "the guest's disks were not replaced"
        return Settled(truth=truth, outcome=Outcome.FAILED, did=tuple(did))
    beside = f" (other images next to them: {', '.join(left)})" if left else ""
    return Settled(
        truth=f"it is unknown whether the restore took place: {why}",
        outcome=None,
        settle=f"check which images are the right ones{beside}, move the others away, then run"
        " vmckpt recover, or vmckpt recover --forget JOB if it is still unknown",
    )


def came_in(told: Settled, *, waits: bool, whole: bool) -> Settled:
    """Return the result of an orphaned lazy restore.

    `waits`: whether its disks were still being restored; `whole`: whether they are complete now.
    """
    if not waits:
        return told
    if not whole:
        return Settled(
            truth="the guest is running while its disks are still being restored",
            outcome=None, goes_on=True,
        )  # fmt: skip
    return replace(
        told, truth=f"{told.truth}, and its disks are complete", outcome=Outcome.COMPLETED
    )


def snapshot_verdict(*, published: bool) -> Settled:
    """Return the result of an orphaned snapshot. `published`: whether it is in the store."""
    if published:
        return Settled(
            truth="the snapshot is in the store",
            outcome=Outcome.COMPLETED,
            did=("restore the settings that were changed for the capture",),
        )
    return Settled(
        truth="no snapshot was published",
        outcome=Outcome.FAILED,
        did=("restore the settings that were changed for the capture", "remove the captured data"),
    )


def _order(case: OrphanedJob, begun: StoredStep) -> PutBackOrder:
    facts = {one.name: str(one.intent["facts"]) for one in case.steps if "facts" in one.intent}
    return PutBackOrder(
        guest=case.operation.guest_uuid or "",
        uri=client.LIBVIRT,
        host=case.host.name,
        store=StorePlace(
            name=str(begun.intent["store"]),
            url=str(begun.intent["url"]),
            id=begun.intent.get("id"),
        ),
        state=str(begun.intent["state"]),
        snapshot=str(begun.intent["snapshot"]),
        capture=facts.get(Step.CAPTURE),
        backup=facts.get(Step.BACKUP),
        freeze=facts.get(Step.FREEZE),
        hold=facts.get(Step.HOLD),
        dry=case.dry,
    )


async def settle_guard(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover an orphaned guard; see recovery.Handler.

    The guest is not rolled back, as the command may have succeeded.
    """
    del policies
    begun = case.step(Step.GUARD)
    told = guard_verdict(
        None if begun is None else (str(begun.intent["snapshot"]), str(begun.intent["store"]))
    )
    return case.ended(told)


def guard_verdict(checkpoint: tuple[str, str] | None) -> Settled:
    """Return the result of an orphaned guard; `checkpoint` is its snapshot and store. Pure."""
    if checkpoint is None:
        return Settled(truth="the guarded command had not started", outcome=Outcome.FAILED)
    return Settled(
        truth="it is unknown how the guarded command exited, and the guest was not checked",
        outcome=Outcome.FAILED,
        did=(f"keep the checkpoint; to restore it, run {way_back(*checkpoint)}",),
    )


async def settle_proof(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Remove the guest of an orphaned boot test; see recovery.Handler."""
    del policies
    begun = case.step(Step.PROOF)
    if begun is not None and not case.dry:
        # Recovery is loaded at every start, so the restore code is imported only when needed.
        from vmckpt.snapshot.verify import boot_test  # noqa: PLC0415

        await boot_test.discard(
            case.host, str(begun.intent["snapshot"]),
            str(begun.intent["fork"]), dict(begun.intent["images"]),
        )  # fmt: skip
    told = Settled(
        truth="the boot test of the snapshot did not finish",
        outcome=Outcome.FAILED,
        did=("stop the test guest", "remove its images"),
    )
    return case.ended(told)


async def settle_fork(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """End an orphaned start of forks; see recovery.Handler. Forks that are running are kept."""
    del policies
    begun = case.step(Step.FORK)
    told = _NEVER
    if begun is not None:
        from vmckpt.snapshot import forks  # noqa: PLC0415 - see settle_proof

        family = str(begun.intent["family"])
        found = [one for one in await forks.families(case.host) if one.id == family]
        runs = sum(fork.runs for one in found for fork in one.forks)
        told = fork_verdict(family, runs, len(begun.intent["guests"]))
    return case.ended(told)


def fork_verdict(family: str, runs: int, ordered: int) -> Settled:
    """Return the result of an orphaned start of forks. Pure.

    `family`: ID of the family; `runs`: number of its forks that are running, of the `ordered`.
    """
    if not runs:
        return Settled(truth="no fork is running", outcome=Outcome.FAILED)
    return Settled(
        truth=f"{runs} of {show_count(ordered, 'fork')} are running",
        outcome=Outcome.COMPLETED,
        did=(f"keep the forks; to drop them, run vmckpt fork drop --family {family}",),
    )


async def settle_service(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover an orphaned scheduler; see recovery.Handler.

    The snapshots that the service was taking are separate operations.
    """
    del policies
    told = Settled(
        truth="the service has stopped", outcome=Outcome.FAILED, did=("release its schedules",)
    )
    return case.ended(told)


BY_KIND: Mapping[str, Callable[[OrphanedJob, Sequence[Policy]], Awaitable[Settled]]] = {
    "snapshot": settle,
    "restore": settle_restore,
    "guard": settle_guard,
    "prepare": prepare.settle,
    "proof": settle_proof,
    "fork": settle_fork,
    "run": settle_service,
}
"""The handler of each kind of snapshot operation."""
