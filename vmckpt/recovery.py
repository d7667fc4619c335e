"""Recover after any crash: examine each orphaned operation, and finish or undo it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from vmckpt.errors import Cancelled, GuestLocked, LeaseLost, TwoCopies, VmckptError
from vmckpt.inventory import Inventory
from vmckpt.journal import jobs, location, maintenance, recorder
from vmckpt.journal.recorder import OrphanedJob, Recorder
from vmckpt.journal.records import MAINTENANCE, Operation
from vmckpt.migration.cancellable import cancellable
from vmckpt.migration.recovery import recover as moves
from vmckpt.model.events import Caller
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.protection.steps import Step

if TYPE_CHECKING:
    from vmckpt.journal.store import Journal


class Handler(Protocol):
    """Finishes or undoes the operations of one kind."""

    async def __call__(self, case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
        """Query the hosts, decide, and act as far as the case allows. Returns the result."""


async def _settle_snapshot(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover a snapshot operation of any kind."""
    # Imported here, so that a command with nothing to recover does not load these modules.
    from vmckpt.snapshot import recovery as snapshots  # noqa: PLC0415

    return await snapshots.BY_KIND[case.operation.kind](case, policies)


async def _settle_protection(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    from vmckpt.protection import recovery as protections  # noqa: PLC0415

    return await protections.settle(case, policies)


async def _settle_move(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    """Recover a migration by libvirt, or a migration by epochs, which agents carry out."""
    if not any(step.name == Step.PROTECT for step in case.steps):
        return await moves.settle(case, policies)
    from vmckpt.protection.migration import recovery  # noqa: PLC0415

    if recovery.begun(case.steps) is None:
        return await moves.settle(case, policies)
    return await recovery.settle(case, policies)


async def _settle_evacuation(case: OrphanedJob, policies: Sequence[Policy]) -> Settled:
    from vmckpt.evacuation import service as evacuations  # noqa: PLC0415

    async def resolve(job: str) -> Outcome | None:
        return (await recover_job(case.inventory, policies, case.caller, job)).outcome

    return await evacuations.settle(case, policies, resolve)


HANDLERS: Mapping[str, Handler] = {
    "migrate": _settle_move,
    "resume": moves.settle,
    "snapshot": _settle_snapshot,
    "restore": _settle_snapshot,
    "guard": _settle_snapshot,
    "prepare": _settle_snapshot,
    "proof": _settle_snapshot,
    "fork": _settle_snapshot,
    "protect": _settle_protection,
    "run": _settle_snapshot,
    "evacuate": _settle_evacuation,
    "repopulate": _settle_evacuation,
    "balance": _settle_evacuation,
    MAINTENANCE: maintenance.settle,
}
"""The handler of each kind of operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """One operation and the result of its recovery."""

    operation: Operation
    settled: Settled

    @property
    def in_words(self) -> str:
        """The state that was found, and what was done or remains to be done, in one line."""
        one = self.settled
        more = one.settle
        if one.goes_on:
            more = one.settle or "run vmckpt recover to monitor it until it ends"
        elif one.outcome is not None:
            return f"{one.truth}; done: {'; '.join(one.did)}" if one.did else one.truth
        return f"{one.truth}: {more}" if more else one.truth

    def as_json(self) -> dict[str, Any]:
        one = self.operation
        return {
            "job": one.id,
            "kind": one.kind,
            "guest": one.guest,
            "source": one.source,
            "target": one.target,
            "asked_by": one.asked_by,
            "phase": one.phase,
            **self.settled.as_json(),
        }


async def recover_all(
    inventory: Inventory, policies: Sequence[Policy], caller: Caller, *, dry_run: bool
) -> list[Recovered]:
    """Recover all orphaned operations, and check those that are delegated to agents.

    Returns each operation with its result: first the orphaned ones, then the delegated ones.
    Operations that are still running are monitored concurrently until they end or `caller.stop` is
    set. With `dry_run`, nothing is changed or monitored. Raises JournalError.
    """
    # Ending the monitoring must not cancel an operation, so the engine's stop event is never set.
    deaf = replace(caller, stop=asyncio.Event())
    with jobs.open_journal() as journal:
        one = _One(journal, inventory, policies, deaf)
        told = await one.look_at_all(entrusted=True)
        if not dry_run:
            told = await one.put_in_order(told)
            told = await one.adopt(told, caller.stop)
        return told


async def recover_before(inventory: Inventory, policies: Sequence[Policy], caller: Caller) -> bool:
    """Recover orphaned operations that can be recovered immediately, before a command acts.

    Returns whether any operation was recovered. Operations that are still running or cannot be
    settled are only reported; their guests stay locked. Raises JournalError.
    """
    if location.default() == location.NONE:
        return False
    # Loading the database library takes half a second, during which the hosts can be queried.
    with await asyncio.to_thread(jobs.open_journal) as journal:
        # Stopping this command must not cancel an operation that another command left behind.
        one = _One(journal, inventory, policies, replace(caller, stop=asyncio.Event()))
        found = await one.look_at_all()
        if not found:
            return False
        told = await one.put_in_order(found)
    for recovered in told:
        caller.warn(f"{recovered.operation.id} ({recovered.operation.guest}): {recovered.in_words}")
    return any(recovered.settled.outcome is not None for recovered in told)


async def recover_job(
    inventory: Inventory, policies: Sequence[Policy], caller: Caller, job: str
) -> Settled:
    """Recover one operation whose end was not recorded. Monitors it if it is still running.

    `job`: the operation's ID. Raises JournalError, and the errors of the operation's handler.
    """
    with jobs.open_journal() as journal:
        one_ = _One(journal, inventory, policies, caller)
        return await one_.settle(journal.operation(job), adopt=True)


class _One:
    """Recovers orphaned operations on behalf of one command."""

    def __init__(
        self, journal: "Journal", inventory: Inventory, policies: Sequence[Policy], caller: Caller
    ) -> None:
        self._journal = journal
        self._inventory = inventory
        self._policies = policies
        self._caller = caller

    async def look_at_all(self, *, entrusted: bool = False) -> list[Recovered]:
        """Return what recovery would do with each operation, without changing anything.

        `entrusted`: include operations that are delegated to the agents.
        """
        found = await asyncio.to_thread(self._journal.abandoned)
        if entrusted:
            found += await asyncio.to_thread(self._journal.delegated_to_agents)
        looks = await asyncio.gather(*(self.look(operation) for operation in found))
        return [Recovered(operation=o, settled=s) for o, s in zip(found, looks, strict=True)]

    async def put_in_order(self, found: Sequence[Recovered]) -> list[Recovered]:
        """Finish or undo operations that have ended, one after the other.

        Returns all of `found`, updated.
        """
        return [
            one if one.settled.outcome is None else await self._settled(one, adopt=False)
            for one in found
        ]

    async def adopt(self, found: Sequence[Recovered], stop: asyncio.Event) -> list[Recovered]:
        """Monitor operations that are still running, until they end or `stop` is set.

        Returns all of `found`, updated.
        """

        async def watched(one: Recovered) -> Recovered:
            if not one.settled.goes_on:
                return one
            try:
                return await cancellable(self._settled(one, adopt=True), stop)
            except Cancelled:
                return one

        return list(await asyncio.gather(*(watched(one) for one in found)))

    async def _settled(self, one: Recovered, *, adopt: bool) -> Recovered:
        return replace(one, settled=await self.settle(one.operation, adopt=adopt))

    async def look(self, operation: Operation) -> Settled:
        """Return what recovery would do, without changing anything. Errors count as unsettled."""
        try:
            return await self._ask(operation, None, adopt=False)
        except VmckptError as exc:
            return _unsettled(exc)

    async def settle(self, operation: Operation, *, adopt: bool) -> Settled:
        """Become the controller of an operation, and recover it. Returns the result.

        `adopt`: monitor the operation until it ends if it is still running.
        """
        try:
            with recorder.taken_over(self._journal, operation, self._caller.warn) as kept:
                return await self._ask(operation, kept, adopt=adopt)
        except (GuestLocked, LeaseLost) as exc:
            return Settled(truth=f"the job was not recovered: {exc.message}", outcome=None)
        except VmckptError as exc:
            return _unsettled(exc)

    async def _ask(self, operation: Operation, kept: Recorder | None, *, adopt: bool) -> Settled:
        handler = HANDLERS.get(operation.kind)
        if handler is None:
            return Settled(
                truth=f"this version of vmckpt does not support operation {operation.kind!r}",
                outcome=None,
                settle="run vmckpt recover with the newer version that started the operation",
            )
        steps = await asyncio.to_thread(self._journal.steps, operation.id)
        case = OrphanedJob(
            inventory=self._inventory, operation=operation, steps=steps, recorder=kept,
            caller=self._caller, adopt=adopt,
        )  # fmt: skip
        return await handler(case, self._policies)


def _unsettled(error: VmckptError) -> Settled:
    return Settled(
        truth=error.message, outcome=None, settle=error.hint or "",
        two_copies=isinstance(error, TwoCopies),
    )  # fmt: skip
