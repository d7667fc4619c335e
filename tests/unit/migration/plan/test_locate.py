import pytest

from vmckpt.errors import BadInput, OutcomeUnknown
from vmckpt.migration.plan.locate import GuestAt, holder, one_guest
from vmckpt.model.guest import GuestState

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
        ({"alpha": RUNS, "beta": RUNS}, "is running on alpha and beta"),
        ({"alpha": PAUSED, "beta": PAUSED}, "may be switching over"),
    ],
)
def test_two_copies_are_for_a_person(states: dict[str, GuestState], complaint: str) -> None:
    with pytest.raises(OutcomeUnknown, match=complaint):
        holder("web1", states, to="beta")


def at(host: str, uuid: str) -> GuestAt:
    return GuestAt(host=host, uuid=uuid, state=RUNS)


def test_a_namesake_on_the_target_is_not_meant() -> None:
    assert one_guest("web1", [at("alpha", "a"), at("beta", "b")], to="beta") == {"alpha": RUNS}


def test_copies_of_one_guest_are_all_meant() -> None:
    found = [at("alpha", "a"), at("beta", "a"), at("gamma", "a")]

    assert set(one_guest("web1", found, to="beta")) == {"alpha", "beta", "gamma"}


def test_namesakes_elsewhere_must_be_told_apart_by_the_operator() -> None:
    with pytest.raises(BadInput, match="use --from or the UUID"):
        one_guest("web1", [at("alpha", "a"), at("gamma", "b")], to="beta")
