from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.builders import sample
from vmckpt.migration.forecast.dirty_curve import DirtyCurve
from vmckpt.migration.run import progress
from vmckpt.migration.run.progress import PassHistory
from vmckpt.model.migration import JobPhase, JobSample
from vmckpt.policy.model import Stall
from vmckpt.units import MIB, Seconds

STALL = Stall(window=Seconds(10.0), margin=0.04, smoothing=0.5)


def over(samples: Sequence[JobSample], stall: Stall = STALL) -> PassHistory:
    seen = PassHistory(began=Seconds(0.0))
    for one in samples:
        seen = progress.seen(seen, one, stall)
    return seen


def passes(*sizes: float, lasting: float = 2.0) -> PassHistory:
    """Passes that began with so many MiB, each after so many seconds."""
    return over([
        sample(number * lasting, iteration=number + 1, remaining=int(size * MIB),
               transferred=(number + 1) * 100 * MIB)
        for number, size in enumerate(sizes)
    ])  # fmt: skip


def test_a_pass_is_as_large_as_the_most_that_was_left_in_it() -> None:
    seen = over([
        sample(1.0, iteration=1, remaining=90 * MIB, transferred=10 * MIB),
        sample(2.0, iteration=1, remaining=95 * MIB, transferred=20 * MIB),
        sample(3.0, iteration=2, remaining=40 * MIB, transferred=110 * MIB),
        sample(3.5, iteration=2, remaining=20 * MIB, transferred=130 * MIB),
    ])  # fmt: skip

    assert [(p.number, p.began, p.size) for p in seen.passes] == [
        (1, 1.0, 95 * MIB), (2, 3.0, 40 * MIB),
    ]  # fmt: skip
    assert (seen.sent_in(0), seen.sent_in(1)) == (100 * MIB, 20 * MIB)
    assert seen.iteration == 2


def test_what_a_pass_leaves_was_dirtied_while_it_lasted() -> None:
    assert passes(100, 40, 10).curve.points == ((2.0, 10.0 * MIB),)
    seen = passes(100, 40)
    assert progress.seen(seen, sample(9.0, iteration=3, remaining=MIB), STALL).curve.points == (
        (2.0, 40.0 * MIB), (7.0, 1.0 * MIB),
    )  # fmt: skip


def test_a_pass_that_was_skipped_between_two_samples_says_nothing_of_dirtying() -> None:
    seen = over([sample(1.0, iteration=1), sample(9.0, iteration=4, remaining=MIB)])

    assert [one.number for one in seen.passes] == [1, 4]
    assert seen.curve.points == ()


def test_a_counter_that_falls_begins_no_pass() -> None:
    seen = over([sample(1.0, iteration=3), sample(2.0, iteration=2, remaining=MIB)])

    assert [one.number for one in seen.passes] == [3]


@pytest.mark.parametrize("phase", [JobPhase.SETUP, JobPhase.SWITCHOVER])
def test_only_precopy_has_passes(phase: JobPhase) -> None:
    seen = over([sample(1.0, phase=phase, transferred=5)])

    assert seen.passes == ()
    assert seen.iteration == 0
    assert seen.moved_at == 1.0


def test_the_first_look_at_a_post_copy_does_not_say_that_it_moves() -> None:
    assert over([sample(1.0, phase=JobPhase.POST_COPY, transferred=5)]).moved_at is None


def test_before_the_first_pass_there_are_none() -> None:
    assert over([sample(1.0, iteration=0)]).passes == ()
    assert over([]).best(0.04) is None


def test_bandwidth_is_an_average_that_a_silent_moment_does_not_change() -> None:
    seen = over([sample(1.0, bandwidth=100), sample(2.0, bandwidth=200)])

    assert seen.bandwidth == 150
    assert progress.seen(seen, sample(3.0, bandwidth=0), STALL).bandwidth == 150


def test_silence_counts_from_the_last_byte() -> None:
    nothing = PassHistory(began=Seconds(5.0))
    seen = over([
        sample(1.0, transferred=0), sample(2.0, transferred=7), sample(4.0, transferred=7),
    ])  # fmt: skip

    assert nothing.silent_for(Seconds(8.0)) == 3.0
    assert seen.moved_at == 2.0
    assert seen.silent_for(Seconds(6.0)) == 4.0


STALLS = [
    pytest.param((100,), 60.0, 0.0, id="the first pass is the best so far"),
    pytest.param((100, 40, 20), 60.0, 0.0, id="it still gets better"),
    pytest.param((100, 40, 40), 60.0, 56.0, id="not since the third pass began"),
    pytest.param((100, 40, 40), 11.9, 0.0, id="within the window"),
    pytest.param((100, 40, 40), 12.1, 8.1, id="just after it"),
    pytest.param((100, 40, 39), 60.0, 56.0, id="lower by less than the margin is no lower"),
    pytest.param((100, 40, 39, 38), 60.0, 0.0, id="but in the end it adds up"),
    pytest.param((100, 40, 90, 80), 60.0, 56.0, id="worse is not better"),
    pytest.param((100, 40, 90, 30), 60.0, 0.0, id="a new low ends it"),
]


@pytest.mark.parametrize(("sizes", "now", "stalled"), STALLS)
def test_it_is_stalled_since_a_pass_began_with_no_less_than_the_best(
    sizes: tuple[float, ...], now: float, stalled: float
) -> None:
    seen = passes(*sizes)

    assert seen.stalled_for(Seconds(now), STALL) == pytest.approx(stalled)


@pytest.mark.parametrize(
    ("sizes", "low"),
    [
        ((100,), True),
        ((100, 90), True),
        ((100, 40, 90), False),
        ((100, 40, 41), True),
        ((100, 40, 90, 39), True),
    ],
)
def test_a_low_is_a_pass_that_began_with_hardly_more_than_any_later_one(
    sizes: tuple[float, ...], low: bool
) -> None:
    assert passes(*sizes).at_a_low(0.04) is low


def test_what_shrinks_and_how_long_a_pause_would_be() -> None:
    first, second = passes(100), passes(100, 40)
    curve = DirtyCurve(((0.4, 20.0 * MIB), (2.0, 20.0 * MIB)))

    assert (first.shrink, first.downtime) == (None, None)
    assert second.shrink == pytest.approx(0.4)
    # 40 MiB take 0.4 s over 100 MiB/s; 20 MiB are dirty again by then.
    assert replace(second, curve=curve).downtime == pytest.approx(0.2)
