import pytest

from vmckpt.errors import OutcomeUnknown
from vmckpt.migrate.locate import holder
from vmckpt.model.guests import GuestState

RUNS, PAUSED, OFF = GuestState.RUNNING, GuestState.PAUSED, GuestState.SHUT_OFF


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        pytest.param({}, None, id="nowhere"),
        pytest.param({"alpha": RUNS}, "alpha", id="runs"),
        pytest.param({"beta": RUNS}, "beta", id="runs on the target already"),
        pytest.param({"alpha": RUNS, "beta": PAUSED}, "alpha", id="arriving on the target"),
        pytest.param({"beta": PAUSED, "alpha": RUNS}, "alpha", id="the same, asked in turn"),
        pytest.param({"alpha": PAUSED, "beta": OFF}, "alpha", id="paused"),
        pytest.param({"beta": OFF, "alpha": OFF}, "alpha", id="off on both: not the target's"),
        pytest.param({"beta": OFF}, "beta", id="off on the target only"),
    ],
)
def test_the_holder_is_the_host_that_runs_the_guest_else_has_it(
    states: dict[str, GuestState], expected: str | None
) -> None:
    assert holder("web1", states, to="beta") == expected


@pytest.mark.parametrize(
    ("states", "complaint"),
    [
        ({"alpha": RUNS, "beta": RUNS}, "runs on alpha and beta"),
        ({"alpha": PAUSED, "beta": PAUSED}, "may be switching over"),
    ],
)
def test_two_copies_are_for_a_person(states: dict[str, GuestState], complaint: str) -> None:
    with pytest.raises(OutcomeUnknown, match=complaint):
        holder("web1", states, to="beta")
