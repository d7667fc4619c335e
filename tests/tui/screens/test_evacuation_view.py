"""What is shown of a job that is about a whole host."""

from dataclasses import replace

import pytest

from tests.support.dashboards import cells
from tests.tui.still import DRAIN, FLEET, NOW, PART, step
from vmckpt.journal.evacuation_progress import summary, turns
from vmckpt.journal.records import StepState
from vmckpt_tui.screens import evacuation_view


def test_the_queue_of_moves_has_those_that_wait_behind_those_that_began() -> None:
    found = turns(DRAIN.operation, (PART,), ())
    assert [(one.guest, one.state) for one in found] == [("web1", "pre-copy"), ("web2", "waits")]
    told = summary(found)
    assert (told.arrived, told.moving, told.waiting, told.failed) == (0, 1, 1, 0)
    facts = evacuation_view.facts(DRAIN.operation, found, NOW)
    assert "0 arrived, 1 moving, 1 waiting" in facts[0]


@pytest.mark.parametrize(
    "hints", [{"hint": "free memory"}, {"mend": "free memory"}], ids=["current", "earlier version"]
)
def test_a_guest_that_stays_is_shown_with_a_hint(hints: dict[str, str]) -> None:
    left = [{"guest": "db1", "on": "alpha", "why": "no host has room", **hints}]
    drain = replace(DRAIN.operation, detail={**DRAIN.operation.detail, "left": left})
    facts = evacuation_view.facts(drain, turns(drain, (PART,), ()), NOW)
    assert facts[1:] == ["! stays: db1: no host has room → free memory"]


@pytest.mark.parametrize(
    ("states", "shown", "counts"),
    [
        ([StepState.INTENDED], "▶ under way", (0, 2, 0, 0)),
        ([StepState.DONE], "✓ arrived", (1, 1, 0, 0)),
        ([StepState.FAILED], "✗ failed", (0, 1, 0, 1)),
        ([StepState.FAILED, StepState.DONE], "✓ arrived", (1, 1, 0, 0)),
    ],
)
def test_a_move_that_is_no_migration_is_shown_as_its_last_step_has_it(
    states: list[StepState], shown: str, counts: tuple[int, ...]
) -> None:
    steps = [step(state, f"host{at}", at) for at, state in enumerate(states)]
    found = turns(DRAIN.operation, (PART,), steps)
    assert [one.guest for one in found] == ["web1", "web2"]
    moved = found[1]
    assert (moved.tries, moved.target) == (len(states), f"host{len(states) - 1}")
    assert cells(evacuation_view.turn_columns(), moved)[2] == shown
    told = summary(found)
    assert (told.arrived, told.moving, told.waiting, told.failed) == counts


def test_hosts_of_an_evacuation_are_bars() -> None:
    lines = evacuation_view.loads(FLEET, DRAIN.operation, turns(DRAIN.operation, (PART,), ()))
    assert [one.split()[0] for one in lines] == ["alpha", "beta", "gamma"]
    assert lines[0].endswith("12 GiB of 64 GiB")
