import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.replication.primary.pacing import Cycle, Pace, PacingTerms, decide, initial_pace
from vmckpt.units import MIB, Bytes, Seconds, show_seconds

TIME = st.floats(0, 100, allow_subnormal=False).map(Seconds)
CYCLES = st.lists(
    st.builds(
        Cycle,
        interval=TIME,
        pause=TIME,
        busy=TIME,
        output_waited=st.integers(0, 3),
        bytes=st.integers(0, 1 << 40).map(Bytes),
    ),
    max_size=30,
)
FIXED = PacingTerms(interval=Seconds(0.1))
AUTO = PacingTerms(interval=None)


def cycle(*, pause: float = 0.005, busy: float = 0.01, waited: int = 0) -> Cycle:
    return Cycle(
        interval=Seconds(0.1),
        pause=Seconds(pause),
        busy=Seconds(busy),
        output_waited=waited,
        bytes=Bytes(MIB),
    )


def after(terms: PacingTerms, *cycles: Cycle) -> Pace:
    pace = initial_pace(terms)
    for one in cycles:
        pace = decide(pace, one, terms)
    return pace


@dataclass
class World:
    """A guest that dirties memory, and the link to its standby."""

    terms: PacingTerms
    dirties: float = 20 * MIB
    """Bytes in a second, of `working_set` at most."""
    working_set: float = 1024 * MIB
    link: float = 100 * MIB
    sends: Callable[[int], bool] = lambda _: False
    noise: Callable[[int], float] = lambda _: 1.0
    took: float = 0.0
    cycles: list[Cycle] = field(default_factory=list)
    paces: list[Pace] = field(default_factory=list)

    def run(self, epochs: int) -> "World":
        pace = self.paces[-1] if self.paces else initial_pace(self.terms)
        for _ in range(epochs):
            number = len(self.cycles)
            interval = max(pace.interval, self.took)
            size = min(self.dirties * interval, self.working_set)
            one = Cycle(
                interval=Seconds(interval),
                pause=Seconds(0.004 + size / (8192 * MIB)),
                busy=Seconds((0.002 + size / self.link) * self.noise(number)),
                output_waited=int(self.sends(number)),
                bytes=Bytes(int(size)),
            )
            self.took = one.pause + one.busy
            self.cycles.append(one)
            pace = decide(pace, one, self.terms)
            self.paces.append(pace)
        return self

    def last(self, count: int) -> Iterator[tuple[Seconds, Cycle]]:
        pairs = list(zip(self.paces, self.cycles, strict=True))
        return iter((pace.interval, one) for pace, one in pairs[-count:])

    def spread(self, count: int) -> float:
        """Longest by shortest of the last intervals."""
        times = [interval for interval, _ in self.last(count)]
        return max(times) / min(times)


@given(CYCLES, st.none() | st.floats(0.001, 20).map(Seconds), st.floats(0.01, 0.9))
def test_every_interval_is_within_its_bounds_and_says_why(
    cycles: list[Cycle], interval: Seconds | None, slowdown: float
) -> None:
    terms = PacingTerms(interval=interval, slowdown=slowdown)
    pace = initial_pace(terms)
    for one in cycles:
        pace = decide(pace, one, terms)
        least: float = min(pace.took, terms.ceiling)
        if interval is not None:
            least = max(least, min(interval, terms.ceiling))
        elif pace.pause is not None:
            least = max(least, min(pace.pause / slowdown, terms.ceiling))

        assert terms.floor <= pace.interval <= terms.ceiling
        assert pace.interval >= least
        assert show_seconds(pace.interval) in pace.why


def test_a_fixed_interval_is_kept_as_long_as_epochs_fit_into_it() -> None:
    pace = after(FIXED, *[cycle(pause=0.02, busy=0.079)] * 50)

    assert (pace.interval, pace.why) == (0.1, "as requested: 100 ms")


def test_a_fixed_interval_grows_at_once_to_what_fits() -> None:
    pace = after(FIXED, cycle(), cycle(pause=0.01, busy=0.40))

    assert pace.interval == pytest.approx(0.492)
    assert pace.why == "an epoch of 1.0 MiB took 410 ms: 492 ms instead of 100 ms"


def test_after_one_slow_epoch_a_fixed_interval_comes_down_little_by_little() -> None:
    paces = [after(FIXED, cycle(busy=4.0), *[cycle()] * more) for more in range(25)]
    times = [pace.interval for pace in paces]

    assert times[0] == pytest.approx(4.8, rel=0.01)
    assert all(before >= then >= before * 0.6 for before, then in pairwise(times))
    assert times[-1] == 0.1
    assert sum(time for time in times if time > 0.1) < 20
    assert paces[3].why == "recent epochs took up to 1.7 s: 2.0 s instead of 100 ms"


@pytest.mark.parametrize("terms", [FIXED, AUTO, PacingTerms(interval=Seconds(0.02))])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])
def test_on_a_slow_link_the_interval_settles_where_epochs_fit(
    terms: PacingTerms, share: float
) -> None:
    world = World(terms, dirties=share * 100 * MIB).run(150)

    assert world.spread(30) < 1.02
    for interval, one in world.last(30):
        assert one.pause + one.busy <= interval < terms.ceiling


def test_a_guest_that_outruns_the_link_ends_at_its_working_set_or_at_the_ceiling() -> None:
    large = World(FIXED, dirties=200 * MIB, working_set=64 * 1024 * MIB).run(100)
    small = World(FIXED, dirties=200 * MIB, working_set=50 * MIB).run(100)

    assert [interval for interval, _ in large.last(30)] == [10.0] * 30
    assert large.paces[-1].why.endswith("10.0 s (the maximum) instead of 100 ms")
    assert small.spread(30) < 1.01
    assert small.paces[-1].interval == pytest.approx(1.2 * 0.51, rel=0.05)


@pytest.mark.parametrize("terms", [FIXED, AUTO])
def test_a_link_that_is_never_the_same_twice_makes_no_wild_swings(terms: PacingTerms) -> None:
    rng = random.Random(3)
    world = World(
        terms, dirties=50 * MIB, sends=lambda _: True, noise=lambda _: rng.uniform(0.6, 1.4)
    ).run(400)

    assert world.spread(300) < 4
    assert all(0.7 < b.interval / a.interval < 3 for a, b in pairwise(world.paces[100:]))
    late = sum(one.pause + one.busy > interval for interval, one in world.last(300))
    assert late == 0


def test_the_pauses_of_a_guest_that_sends_take_no_more_of_its_time_than_allowed() -> None:
    for slowdown in (0.05, 0.1, 0.3):
        world = World(PacingTerms(interval=None, slowdown=slowdown), sends=lambda _: True).run(100)
        paused = sum(one.pause for _, one in world.last(50))
        passed = sum(one.interval for _, one in world.last(50))

        assert 0.3 * slowdown < paused / passed <= slowdown * 1.001


def test_a_guest_that_sends_nothing_drifts_to_a_relaxed_interval() -> None:
    world = World(AUTO).run(60)
    times = [pace.interval for pace in world.paces]

    assert all(then <= before * 1.16 for before, then in pairwise(times))
    assert times[-1] == pytest.approx(4 * (world.paces[-1].pause or 0) / 0.1, rel=0.01)
    assert world.paces[-1].why.startswith("no output waited: ")


def test_a_guest_that_begins_to_send_is_served_at_once() -> None:
    world = World(AUTO, dirties=0, sends=lambda number: number == 60).run(61)

    assert world.paces[-2].interval == pytest.approx(0.16)
    assert world.paces[-1].interval == pytest.approx(0.04)
    assert world.paces[-1].why == (
        "1 packet waited, and pauses of 4 ms may take 10 % of the time: 40 ms"
    )


def test_a_guest_that_sends_now_and_then_is_neither_slow_nor_restless() -> None:
    world = World(AUTO, dirties=0, sends=lambda number: number % 10 < 2).run(200)

    assert world.spread(150) < 4.01
    for interval, one in world.last(150):
        assert interval == pytest.approx(0.04) or not one.output_waited
    falls = sum(then < before for before, then in pairwise([t for t, _ in world.last(150)]))
    assert falls <= 15


def test_one_long_pause_makes_an_interval_only_a_little_longer() -> None:
    usual = [cycle(busy=0, waited=1)] * 20

    assert after(AUTO, *usual).interval == pytest.approx(0.05)
    assert after(AUTO, *usual, cycle(pause=1.0, busy=0, waited=1)).pause == pytest.approx(0.0065)
    assert after(AUTO, *usual, cycle(pause=1.0, busy=0), *usual).interval == pytest.approx(
        0.05, rel=0.1
    )


def test_pauses_that_stay_long_count_in_full_after_ten_epochs() -> None:
    usual, longer = cycle(busy=0, waited=1), cycle(pause=0.05, busy=0, waited=1)
    pace = after(AUTO, *[usual] * 20, *[longer] * 10)

    assert pace.interval == pytest.approx(0.5, rel=0.3)
    assert after(AUTO, *[usual] * 20, *[longer] * 30).interval == pytest.approx(0.5, rel=0.01)


def test_the_link_counts_for_a_guest_that_sends_too() -> None:
    pace = after(AUTO, cycle(pause=0.001, busy=0.299, waited=12))

    assert pace.interval == pytest.approx(0.36)
    assert pace.why == "12 packets waited, and an epoch of 1.0 MiB took 300 ms: 360 ms"


@pytest.mark.parametrize(
    ("interval", "pause", "expected", "why"),
    [
        pytest.param(0.001, 0.0, 0.02, "as requested: 20 ms (the minimum)", id="floor"),
        pytest.param(60.0, 0.0, 10.0, "as requested: 10.0 s (the maximum)", id="ceiling"),
        pytest.param(None, 0.0001, 0.02, "20 ms (the minimum)", id="auto floor"),
        pytest.param(None, 5.0, 10.0, "10.0 s (the maximum)", id="auto ceiling"),
    ],
)
def test_what_is_not_allowed_is_told(
    interval: Seconds | None, pause: float, expected: float, why: str
) -> None:
    pace = after(PacingTerms(interval=interval), *[cycle(pause=pause, busy=0.0, waited=1)] * 3)

    assert pace.interval == expected
    assert pace.why.endswith(why)


def test_the_first_interval_says_that_it_is_the_first() -> None:
    assert initial_pace(AUTO).why == "initial interval: 100 ms"
    assert initial_pace(FIXED) == Pace(interval=Seconds(0.1), why="as requested: 100 ms")
    assert initial_pace(replace(AUTO, ceiling=Seconds(0.05))).interval == 0.05


def test_other_terms_hold_from_the_next_epoch_on() -> None:
    pace = after(AUTO, *[cycle()] * 50)

    assert decide(pace, cycle(), PacingTerms(interval=Seconds(0.03))).interval == 0.03
    assert decide(pace, cycle(), replace(AUTO, floor=Seconds(1.0))).interval == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0.0}, {"interval": math.nan}, {"interval": math.inf}, {"floor": 0.0},
        {"floor": 11.0}, {"ceiling": math.inf}, {"slowdown": 0.0}, {"slowdown": 1.0},
        {"relaxed": 0.5}, {"slowdown": math.nan},
    ],
)  # fmt: skip
def test_terms_that_nobody_can_have_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong.values()))}"):
        PacingTerms(**{"interval": None, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [-0.1, math.nan, math.inf])
@pytest.mark.parametrize("name", ["interval", "pause", "busy"])
def test_times_that_cannot_be_are_refused(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match="invalid times"):
        replace(cycle(), **{name: wrong})  # type: ignore[arg-type]
