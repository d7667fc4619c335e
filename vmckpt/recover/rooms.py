"""Which room puts which kind of operation in order."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from vmckpt.journal import maintenance
from vmckpt.journal.recorder import Unattended
from vmckpt.journal.records import MAINTENANCE
from vmckpt.migration.recovery import recover as moves
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.protection.steps import Step
from vmckpt.snapshot import prepare
from vmckpt.snapshot import recovery as snapshots
from vmckpt.snapshot.recovery import settle_guard, settle_proof, settle_service


class Room(Protocol):
    """How a room finishes and undoes its operations."""

    async def __call__(self, case: Unattended, policies: Sequence[Policy]) -> Settled:
        """Look at the hosts, decide, and do it, as far as the case says."""


async def _settle_protection(case: Unattended, policies: Sequence[Policy]) -> Settled:
    # Only who recovers one pays for what it needs.
    from vmckpt.protection import recovery as protections  # noqa: PLC0415

    return await protections.settle(case, policies)


async def _settle_move(case: Unattended, policies: Sequence[Policy]) -> Settled:
    """Whoever drove it: libvirt, or agents as those of a protection."""
    if not any(step.name == Step.PROTECT for step in case.steps):
        return await moves.settle(case, policies)
    from vmckpt.protection.migration import recovery  # noqa: PLC0415

    if recovery.begun(case.steps) is None:
        return await moves.settle(case, policies)
    return await recovery.settle(case, policies)


async def _settle_evacuation(case: Unattended, policies: Sequence[Policy]) -> Settled:
    from vmckpt.evacuation import service as evacuations  # noqa: PLC0415
    from vmckpt.recover import engine  # noqa: PLC0415

    async def resolve(job: str) -> Outcome | None:
        return (await engine.one(case.inventory, policies, case.caller, job)).outcome

    return await evacuations.settle(case, policies, resolve)


ROOMS: Mapping[str, Room] = {
    "migrate": _settle_move,
    "resume": moves.settle,
    "snapshot": snapshots.settle,
    "restore": snapshots.settle_restore,
    "guard": settle_guard,
    "prepare": prepare.settle,
    "proof": settle_proof,
    "protect": _settle_protection,
    "run": settle_service,
    "evacuate": _settle_evacuation,
    "repopulate": _settle_evacuation,
    "balance": _settle_evacuation,
    MAINTENANCE: maintenance.settle,
}
"""By the operation's kind."""
