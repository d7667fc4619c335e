import pytest

from vmckpt.migration.run.postcopy_recovery import Ask, Resume, State, Wait, backoff, next_step
from vmckpt.units import Seconds


def state(
    *, call: bool = False, given_up: bool = True, answers: bool = True, broken: float | None = None,
    attempts: int = 0, last: float | None = None,
) -> State:  # fmt: skip
    return State(
        call_runs=call, given_up=given_up, target_answers=answers,
        broken=broken is not None, broken_for=Seconds(broken or 0.0),
        attempts=attempts, last_attempt=None if last is None else Seconds(last),
    )  # fmt: skip


TABLE = [
    (state(call=True, given_up=False), Wait, "it moves"),
    (state(call=True, given_up=False, broken=99), Wait, "a cut link is left to TCP"),
    (state(call=True, given_up=False, broken=600), Ask, "for so long, and no longer"),
    (state(call=True, broken=9), Wait, "the call is about to end"),
    (state(given_up=False), Wait, "our call was lost, the stream goes on"),
    (state(given_up=False, broken=99), Wait, "our call was lost, and TCP is at it"),
    (state(given_up=False, broken=600), Ask, "the same for too long"),
    (state(broken=0.2), Resume, "QEMU has given it up"),
    (state(broken=9, answers=False), Wait, "towards a silent host it would hang"),
    (state(broken=9, attempts=1, last=0.9), Wait, "too early"),
    (state(broken=9, attempts=1, last=1.0), Resume, "again"),
    (state(broken=99, attempts=9, last=29), Wait, "at most half a minute"),
    (state(broken=99, attempts=9, last=30), Resume, "then again"),
    (state(broken=600, attempts=9, last=31), Ask, "long enough"),
    (state(broken=600, answers=False), Ask, "also with a silent host"),
]


@pytest.mark.parametrize(
    ("seen", "step"), [(s, e) for s, e, _ in TABLE], ids=[said for *_, said in TABLE]
)
def test_what_is_done_about_a_stream(seen: State, step: type) -> None:
    assert isinstance(next_step(seen, Seconds(600.0)), step)


def test_who_wants_to_be_asked_is_asked_as_soon_as_it_breaks() -> None:
    at_once = Seconds(0.0)

    assert isinstance(next_step(state(call=True, given_up=False), at_once), Wait)
    assert isinstance(next_step(state(call=True, given_up=False, broken=5), at_once), Ask)
    assert isinstance(next_step(state(broken=0.0), at_once), Ask)


def test_waits_between_attempts_double_up_to_half_a_minute() -> None:
    assert [backoff(n) for n in range(7)] == pytest.approx([1, 2, 4, 8, 16, 30, 30])
    assert backoff(10_000) == pytest.approx(30)
