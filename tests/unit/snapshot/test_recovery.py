"""What is true of snapshots, restores and guards that nobody attends."""

import pytest

from vmckpt.agent.restore.leftovers import LeftoverDecision
from vmckpt.model.migration import Outcome
from vmckpt.snapshot.recovery import came_back, came_in, guard_verdict


def test_a_guard_without_a_controller_says_the_way_back() -> None:
    told = guard_verdict(("s-x", "near"))
    assert (told.outcome, "restore s-x --store near --replace" in told.did[0]) == (
        Outcome.FAILED, True,
    )  # fmt: skip
    assert guard_verdict(None).did == ()


@pytest.mark.parametrize(
    ("hook", "ran", "truth"),
    [
        (None, False, "the guest was restored"),
        ("x", False, "the guest was restored; its on_restore hook was not run: x"),
        ("x", True, "the guest was restored; its on_restore hook may not have finished: x"),
    ],
)
def test_recovery_says_what_became_of_the_hook(hook: str | None, ran: bool, truth: str) -> None:
    assert came_back(LeftoverDecision.ARRIVED, hook=hook, ran=ran).truth == truth


def test_a_lazy_restore_is_watched_until_its_disks_are_whole() -> None:
    told = came_back(LeftoverDecision.ARRIVED)
    assert came_in(told, waits=False, whole=True) == told
    assert came_in(told, waits=True, whole=False).goes_on
    assert came_in(told, waits=True, whole=True).outcome is Outcome.COMPLETED


def test_recovery_closes_only_what_is_known() -> None:
    unclear = came_back(LeftoverDecision.UNCLEAR, why="x", left=["/s/vda.old"])
    assert (unclear.outcome, "/s/vda.old" in unclear.settle) == (None, True)
    assert came_back(LeftoverDecision.BACK, did=["y"]).did == ("y",)
    assert came_back(LeftoverDecision.BACK).outcome is Outcome.FAILED
    assert (
        came_back(LeftoverDecision.ARRIVED, memory=False).truth == "the guest's disks were restored"
    )


def test_whoever_recovers_one_of_a_group_is_told_that_it_may_stand() -> None:
    told = came_back(LeftoverDecision.ARRIVED, stands=True)
    assert "may be paused; run virsh resume GUEST when all guests of its group" in told.truth
    assert "paused" not in came_back(LeftoverDecision.ARRIVED).truth
