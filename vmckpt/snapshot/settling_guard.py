"""Guards and proofs without a controller: a checkpoint that is there, and a guest that must go."""

from collections.abc import Sequence

from vmckpt.journal.recorder import Unattended
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Policy
from vmckpt.snapshot.guarding import way_back
from vmckpt.snapshot.steps import Step


async def settle_guard(case: Unattended, policies: Sequence[Policy]) -> Settled:
    """See recover.rooms.Room. Nothing is taken back: nobody here knows whether all went well."""
    del policies
    begun = case.step(Step.GUARD)
    told = verdict(
        None if begun is None else (str(begun.intent["snapshot"]), str(begun.intent["store"]))
    )
    return case.ended(told)


def verdict(checkpoint: tuple[str, str] | None) -> Settled:
    """What is true of a guard that nobody attends; `checkpoint`: its snapshot and store. Pure."""
    if checkpoint is None:
        return Settled(truth="its command had not begun", outcome=Outcome.FAILED)
    return Settled(
        truth="how its command ended is not known, and nobody looked at the guest",
        outcome=Outcome.FAILED,
        did=(f"keep the checkpoint; the way back is {way_back(*checkpoint)}",),
    )


async def settle_proof(case: Unattended, policies: Sequence[Policy]) -> Settled:
    """See recover.rooms.Room. A guest that was only to be looked at is taken away."""
    del policies
    begun = case.step(Step.PROOF)
    if begun is not None and not case.dry:
        # It restores, too, and recovery is loaded at every start.
        from vmckpt.snapshot import booting  # noqa: PLC0415

        await booting.discard(
            case.host, str(begun.intent["snapshot"]),
            str(begun.intent["fork"]), dict(begun.intent["images"]),
        )  # fmt: skip
    told = Settled(
        truth="whether the snapshot comes to life is not known",
        outcome=Outcome.FAILED,
        did=("end the guest that was to show it", "remove its images"),
    )
    return case.ended(told)
