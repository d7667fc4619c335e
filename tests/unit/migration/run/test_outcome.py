import pytest

from vmckpt.migration.run import outcome as run_outcome
from vmckpt.migration.run.actions import Stop
from vmckpt.migration.run.outcome import PassCounter
from vmckpt.model.guest import GuestState, Presence
from vmckpt.model.migration import Outcome

RUNS = Presence(reachable=True, state=GuestState.RUNNING)
MOVING = Presence(reachable=True, state=GuestState.RUNNING, migrating=True)
RESUMED = Presence(reachable=True, state=GuestState.RUNNING, resumed=True)
PAUSED = Presence(reachable=True, state=GuestState.PAUSED)
HELD = Presence(reachable=True, state=GuestState.PAUSED, held=True)
OFF = Presence(reachable=True, state=GuestState.SHUT_OFF)
GONE = Presence(reachable=True)
SILENT = Presence(reachable=False)
KEPT = Presence(reachable=True, state=GuestState.PAUSED, post_copy=True)
ON_PART = Presence(reachable=True, state=GuestState.RUNNING, post_copy=True)


@pytest.mark.parametrize(
    ("source", "target", "outcome"),
    [
        pytest.param(GONE, RUNS, Outcome.COMPLETED, id="moved"),
        pytest.param(OFF, RUNS, Outcome.COMPLETED, id="moved, definition left on the source"),
        pytest.param(RUNS, GONE, Outcome.FAILED, id="never left"),
        pytest.param(RUNS, OFF, Outcome.FAILED, id="never left, defined on both"),
        pytest.param(RUNS, SILENT, Outcome.FAILED, id="never left, target lost"),
        pytest.param(RUNS, PAUSED, None, id="the target still cleans up"),
        pytest.param(RESUMED, GONE, Outcome.FAILED, id="stopped for the switch and resumed"),
        pytest.param(RESUMED, SILENT, None, id="resumed, but the target may run as well"),
        pytest.param(MOVING, PAUSED, None, id="still on its way"),
        pytest.param(PAUSED, RUNS, None, id="switching over"),
        pytest.param(PAUSED, PAUSED, None, id="neither runs"),
        pytest.param(RUNS, RUNS, None, id="both run: never decided from here"),
        pytest.param(GONE, GONE, Outcome.SHUT_OFF, id="ended, transient"),
        pytest.param(OFF, GONE, Outcome.SHUT_OFF, id="ended on the source"),
        pytest.param(GONE, OFF, Outcome.SHUT_OFF, id="ended right after the move"),
        pytest.param(GONE, HELD, None, id="not started on the target yet"),
        pytest.param(GONE, PAUSED, Outcome.COMPLETED, id="moved, and paused there by somebody"),
        pytest.param(SILENT, RUNS, None, id="source lost: it may run there too"),
        pytest.param(GONE, SILENT, None, id="target lost after the switch"),
        pytest.param(SILENT, SILENT, None, id="both lost"),
        pytest.param(KEPT, ON_PART, None, id="in two parts"),
        pytest.param(KEPT, PAUSED, None, id="in two parts, not started on the target yet"),
        pytest.param(KEPT, RUNS, None, id="all is there, the source has not noticed"),
        pytest.param(KEPT, SILENT, None, id="in two parts, target cut off"),
        pytest.param(KEPT, GONE, Outcome.LOST, id="the target lost its part"),
        pytest.param(KEPT, OFF, Outcome.LOST, id="the target lost its part, defined there"),
        pytest.param(SILENT, ON_PART, None, id="source lost in post-copy"),
        pytest.param(OFF, ON_PART, None, id="the last pages are being put in place"),
    ],
)
def test_the_outcome_is_what_both_hosts_say(
    source: Presence, target: Presence, outcome: Outcome | None
) -> None:
    assert run_outcome.settle(source, target, stopped=None) is outcome


@pytest.mark.parametrize(
    ("stopped", "outcome"),
    [
        (Stop.OPERATOR, Outcome.CANCELLED),
        (Stop.TIME_LIMIT, Outcome.TIMED_OUT),
        (Stop.RULE, Outcome.NOT_CONVERGED),
        (None, Outcome.FAILED),
    ],
)
def test_a_guest_that_never_left_was_stopped_or_failed(
    stopped: Stop | None, outcome: Outcome
) -> None:
    assert run_outcome.settle(RUNS, GONE, stopped=stopped) is outcome


def test_a_stop_that_came_too_late_is_no_cancellation() -> None:
    assert run_outcome.settle(GONE, RUNS, stopped=Stop.OPERATOR) is Outcome.COMPLETED


@pytest.mark.parametrize(
    ("readings", "numbers"),
    [
        pytest.param([0, 1, 2, 3], [0, 1, 2, 3], id="fresh"),
        pytest.param([4, 4, 5, 6], [0, 0, 1, 2], id="the counter goes on from a cancelled job"),
        pytest.param([4, 0, 1, 2], [0, 0, 1, 2], id="the counter is reset after the first reading"),
        pytest.param([4, 1, 2, 5], [0, 1, 2, 5], id="the same, past the old value"),
    ],
)
def test_passes_are_counted_from_one(readings: list[int], numbers: list[int]) -> None:
    counter, seen = PassCounter(), []
    for reading in readings:
        counter = counter.after(reading)
        seen.append(counter.number(reading))

    assert numbers == seen
