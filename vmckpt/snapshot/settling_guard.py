"""Guards and proofs without a controller: a checkpoint that is there, and a guest that must go."""

from collections.abc import Sequence

from vmckpt.inventory import Inventory
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Operation, StoredStep
from vmckpt.model.callers import Caller
from vmckpt.model.jobs import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.policy.types import Policy
from vmckpt.snapshot.guarding import way_back
from vmckpt.snapshot.steps import Step


async def settle_guard(
    inventory: Inventory,
    policies: Sequence[Policy],
    operation: Operation,
    steps: Sequence[StoredStep],
    recorder: Recorder | None,
    *,
    caller: Caller,
    adopt: bool,
) -> Settled:
    """See recover.rooms.Room. Nothing is taken back: nobody here knows whether all went well."""
    del inventory, policies, operation, caller, adopt
    begun = next((one for one in steps if one.name == Step.GUARD), None)
    told = verdict(
        None if begun is None else (str(begun.intent["snapshot"]), str(begun.intent["store"]))
    )
    if recorder is not None:
        recorder.finish(told.outcome or Outcome.FAILED, {"recovered": told.as_json()})
    return told


def verdict(checkpoint: tuple[str, str] | None) -> Settled:
    """What is true of a guard that nobody attends; `checkpoint`: its snapshot and store. Pure."""
    if checkpoint is None:
        return Settled(truth="its command had not begun", outcome=Outcome.FAILED)
    return Settled(
        truth="how its command ended is not known, and nobody looked at the guest",
        outcome=Outcome.FAILED,
        did=(f"keep the checkpoint; the way back is {way_back(*checkpoint)}",),
    )


async def settle_proof(
    inventory: Inventory,
    policies: Sequence[Policy],
    operation: Operation,
    steps: Sequence[StoredStep],
    recorder: Recorder | None,
    *,
    caller: Caller,
    adopt: bool,
) -> Settled:
    """See recover.rooms.Room. A guest that was only to be looked at is taken away."""
    del policies, caller, adopt
    begun = next((one for one in steps if one.name == Step.PROOF), None)
    if begun is not None and recorder is not None:
        # It restores, too, and recovery is loaded at every start.
        from vmckpt.snapshot import booting  # noqa: PLC0415

        await booting.discard(
            inventory.host(operation.source or ""), str(begun.intent["snapshot"]),
            str(begun.intent["fork"]), dict(begun.intent["images"]),
        )  # fmt: skip
    told = Settled(
        truth="whether the snapshot comes to life is not known",
        outcome=Outcome.FAILED,
        did=("end the guest that was to show it", "remove its images"),
    )
    if recorder is not None:
        recorder.finish(Outcome.FAILED, {"recovered": told.as_json()})
    return told
