"""Who puts a migration in order: whoever drove it."""

from typing import Any, cast

import pytest

from tests.support.stored_operations import step
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import StepState, StoredStep
from vmckpt.migration.recovery import recover as moves
from vmckpt.model.recovery import Settled
from vmckpt.protection.migration import recovery
from vmckpt.recovery import HANDLERS


def case(*steps: StoredStep) -> OrphanedJob:
    return OrphanedJob(
        inventory=cast("Any", None), operation=cast("Any", None), steps=steps, recorder=None,
        caller=cast("Any", None), adopt=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "who"),
    [
        ((), "libvirt"),
        ((step("set-limits"), step("move")), "libvirt"),
        ((step("protect"),), "agents"),
        ((step("protect", StepState.UNDONE),), "libvirt"),
        ((step("protect", StepState.UNDONE), step("protect")), "agents"),
    ],
)
async def test_a_move_is_settled_by_whoever_drove_it(
    monkeypatch: pytest.MonkeyPatch, steps: tuple[StoredStep, ...], who: str
) -> None:
    def told(what: str) -> Any:
        async def settle(*_: object) -> Settled:
            return Settled(truth=what, outcome=None)

        return settle

    monkeypatch.setattr(moves, "settle", told("libvirt"))
    monkeypatch.setattr(recovery, "settle", told("agents"))
    assert (await HANDLERS["migrate"](case(*steps), ())).truth == who
