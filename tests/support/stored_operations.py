"""A migration and its steps as the journal has them."""

from typing import Any

from vmckpt.journal.records import ControllerIdentity, Operation, StepState, StoredStep

OPERATION = Operation(
    id="m-1", kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta",
    policy="mine", mode="hybrid", state="running", phase=None, outcome=None, asked_by="root@here",
    asked_from=None, controller=ControllerIdentity(host="here", boot="b", pid=1, started=1),
    began_at=0.0, ended_at=None, detail={}, report=None,
)  # fmt: skip


def step(name: str, state: StepState = StepState.INTENDED, **intent: Any) -> StoredStep:
    return StoredStep(
        seq=1, name=name, intent=intent, state=state, result=None, began_at=0.0, ended_at=None
    )
