"""The moves of a job that is about a whole host, as the journal tells them."""

from dataclasses import replace

from tests.tui.still import DRAIN, NOW, PART, step
from vmckpt.journal.evacuation_progress import summary, turns
from vmckpt.journal.records import StepState


def test_who_is_ready_waits_and_who_was_dismissed_has_not_failed() -> None:
    ready = replace(PART, operation=replace(PART.operation, state="waiting"))
    found = turns(DRAIN.operation, (ready,), ())
    assert [one.state for one in found] == ["waiting", "waits"]
    told = summary(found)
    assert (told.moving, told.waiting, told.failed) == (0, 2, 0)
    ended = replace(PART.operation, state="ended", outcome="cancelled", ended_at=NOW)
    for report, failed in (({"dismissed": True}, 0), ({"error": "stopped"}, 1)):
        part = replace(PART, operation=replace(ended, report=report))
        assert summary(turns(DRAIN.operation, (part,), ())).failed == failed


def test_a_step_whose_job_has_ended_was_broken_off() -> None:
    over = replace(DRAIN.operation, state="ended", outcome="failed", ended_at=NOW)
    (_, moved) = turns(over, (PART,), [step(StepState.INTENDED, "beta", 1)])
    assert (moved.state, moved.active) == ("interrupted", False)


def test_those_that_wait_are_behind_those_that_began_and_moved_as_their_last_step_has_it() -> None:
    steps = [step(StepState.FAILED, "beta", 1), step(StepState.DONE, "gamma", 2)]
    first, second = turns(DRAIN.operation, (PART,), ())
    assert (first.guest, first.tries, second.guest, second.tries) == ("web1", 1, "web2", 0)
    _, moved = turns(DRAIN.operation, (PART,), steps)
    assert (moved.guest, moved.target, moved.tries, moved.state) == (
        "web2", "gamma", 2, "completed"
    )  # fmt: skip
    assert moved.begins == second.begins


def test_what_is_done_is_the_share_of_those_that_arrived() -> None:
    found = turns(DRAIN.operation, (PART,), [step(StepState.DONE, "beta", 1)])
    assert summary(found).done == 0.5
    assert summary(()).done == 1.0
