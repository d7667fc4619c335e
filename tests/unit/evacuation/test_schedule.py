"""Moves in their order: windows, shared links, room on the way, and steps aside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.support.fleets import GIB, host
from tests.support.planned_moves import GBIT, RULES, move
from vmckpt.evacuation.bandwidth import SETUP, Move, Under, advance, begin, over, pays, shares
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Tenant
from vmckpt.evacuation.schedule import Windows, start
from vmckpt.units import BytesPerSecond, Seconds

LINKS = dict.fromkeys("abc", GBIT)


def slowed(one: Move, most: int) -> Move:
    """Its stream carries no more."""
    return replace(one, tenant=replace(one.tenant, most=BytesPerSecond(most)))


def all_done(running: Sequence[Under], links: Mapping[str, BytesPerSecond]) -> float:
    """How long until all have ended, if nobody else begins."""
    total = 0.0
    left = [one for one in running if not over(one)]
    while left:
        step, after = advance(left, links)
        total += step
        left = [one for one in after if not over(one)]
    return total


def sending(*moves: Move) -> list[Under]:
    """Through with their setup."""
    _, after = advance([begin(one) for one in moves], LINKS)
    return after


def test_a_link_is_shared_fairly_at_both_ends() -> None:
    under = [begin(move("x", "a", "b")), begin(move("y", "a", "c"))]
    assert shares(under, LINKS) == {}  # in their setup
    _, after = advance(under, LINKS)
    assert shares(after, LINKS) == {"x": GBIT / 2, "y": GBIT / 2}
    links = {"a": BytesPerSecond(4 * GBIT), "b": GBIT, "c": BytesPerSecond(9 * GBIT)}
    assert shares(after, links) == {"x": GBIT, "y": 3 * GBIT}


def test_time_is_what_has_to_travel_and_what_is_written_meanwhile() -> None:
    quiet = all_done([begin(move("x", "a", "b", 4))], LINKS)
    assert quiet == pytest.approx(SETUP + 4 * GIB / GBIT)
    half = BytesPerSecond(GBIT // 2)
    busy = all_done([begin(move("x", "a", "b", 4, dirty=half))], LINKS)
    assert busy == pytest.approx(SETUP + 8 * GIB / GBIT)
    # One that never converges ends all the same.
    assert all_done([begin(move("x", "a", "b", 4, dirty=9 * GBIT))], LINKS) < 600


def test_a_full_link_is_not_shared_and_one_with_room_is() -> None:
    running = [begin(move("x", "a", "b", 4))]
    assert not pays(move("y", "a", "c"), running, LINKS)
    wide = {**LINKS, "a": BytesPerSecond(10 * GBIT)}
    assert pays(move("y", "a", "c"), running, wide)
    assert not pays(move("y", "a", "b"), running, wide)
    # Another link is nobody's business.
    assert pays(move("z", "c", "d"), running, {**LINKS, "d": GBIT})


def test_streams_that_cannot_fill_a_link_go_side_by_side() -> None:
    slow = BytesPerSecond(GBIT // 3)
    running = [begin(slowed(move("x", "a", "b", 4), slow))]
    other = slowed(move("y", "a", "c"), slow)
    assert pays(other, running, LINKS)
    assert shares(sending(running[0].move, other), LINKS) == {"x": slow, "y": slow}


@pytest.mark.parametrize(("dirty", "worth"), [(0.0, True), (0.2, True), (0.3, False)])
def test_what_one_stream_leaves_of_a_link_is_used_if_both_are_served(
    dirty: float, worth: bool
) -> None:
    """Half of the link for each: less than one has alone, and together much more."""
    slow = round(0.7 * GBIT)
    running = [begin(slowed(move("x", "a", "b", dirty=round(dirty * GBIT)), slow))]
    assert pays(slowed(move("y", "a", "c"), slow), running, LINKS) is worth
    assert not pays(
        slowed(move("y", "a", "c"), round(0.85 * GBIT)),
        [begin(slowed(move("x", "a", "b"), round(0.85 * GBIT)))],
        LINKS,
    )


def test_the_next_one_begins_while_the_last_one_ends() -> None:
    under = [begin(move("x", "a", "b", 4))]
    took = 0.0
    while not pays(move("y", "a", "c"), under, LINKS):
        step, under = advance(under, LINKS)
        took += step
    assert took == pytest.approx(4 * GIB / GBIT)
    assert all_done(under, LINKS) == pytest.approx(SETUP)


def test_one_may_begin_while_another_ends_and_no_more_than_one() -> None:
    links = {"a": BytesPerSecond(9 * GBIT), "b": BytesPerSecond(9 * GBIT)}
    waiting = [move(name, "a", "b", 1) for name in "xyz"]
    ends = [replace(begin(move(name, "a", "b", 1)), setup=Seconds(0.0), ending=True)
            for name in "uv"]  # fmt: skip
    capacity = CapacityModel([host(name) for name in "ab"], [], RULES)

    def begun(*running: Under) -> int:
        return len(start(capacity, waiting, running, links, Windows()))

    assert begun() == 1  # a second one would only share the link
    assert begun(begin(move("u", "a", "b", 1))) == 0
    assert begun(ends[0]) == 1
    assert begun(*ends) == 1
    assert begun(*ends, begin(move("w", "a", "b", 1))) == 0


def gone(leaving: Sequence[Tenant]) -> int:
    return sum(one.memory for one in leaving)
