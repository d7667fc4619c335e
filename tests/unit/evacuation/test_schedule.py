"""Moves in their order: windows, shared links, room on the way, and steps aside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.fleets import GIB, fleet, guest, host, random_fleet
from vmckpt.evacuation.bandwidth import SETUP, Move, Under, advance, begin, over, pays, shares
from vmckpt.evacuation.plan.capacity import CapacityModel
from vmckpt.evacuation.plan.fleet import Fleet, Rules, Tenant
from vmckpt.evacuation.plan.forecast import Outlook, play
from vmckpt.evacuation.plan.placement import place
from vmckpt.evacuation.schedule import Windows, start
from vmckpt.policy.model import Order
from vmckpt.units import BytesPerSecond, Seconds

RULES = Rules(keep_free=0.0)
GBIT = BytesPerSecond(125_000_000)
LINKS = dict.fromkeys("abc", GBIT)
WIDE = Windows(per_source=8, per_target=8)


def move(name: str, source: str, target: str, memory: float = 4, **more: object) -> Move:
    return Move(tenant=guest(name, source, memory, **more), source=source, target=target)


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


def played(
    made: Fleet, moves: Sequence[Move], windows: Windows = WIDE, rules: Rules = RULES
) -> Outlook:
    found = play(made, moves, rules, windows)
    assert found.stuck == ()
    return found


def test_windows_slide_and_nobody_waits_for_a_batch() -> None:
    moves = [move("long", "a", "b", 16), *(move(f"s{n}", "a", "c", 1) for n in range(4))]
    links = {"a": BytesPerSecond(2 * GBIT), "b": GBIT, "c": GBIT}
    places = [host(name, link=link) for name, link in links.items()]
    made = fleet(places, *(one.tenant for one in moves))
    found = played(made, moves, Windows(per_source=2))
    ends = {one.move.name: one.ends for one in found.steps}
    assert max(ends[f"s{n}"] for n in range(4)) < ends["long"]
    for at in (one.begins for one in found.steps):
        under = [one for one in found.steps if one.begins <= at < one.ends]
        assert len(under) <= 3
        assert sum(one.ends - at > SETUP + 1e-6 for one in under) <= 2


def test_one_may_begin_while_another_ends_and_no_more_than_one() -> None:
    links = {"a": BytesPerSecond(9 * GBIT), "b": BytesPerSecond(9 * GBIT)}
    waiting = [move(name, "a", "b", 1) for name in "xyz"]
    ends = [replace(begin(move(name, "a", "b", 1)), setup=Seconds(0.0), ending=True)
            for name in "uv"]  # fmt: skip
    seating = CapacityModel([host(name) for name in "ab"], [], RULES)

    def begun(*running: Under) -> int:
        return len(start(seating, waiting, running, links, Windows()))

    assert begun() == 1  # a second one would only share the link
    assert begun(begin(move("u", "a", "b", 1))) == 0
    assert begun(ends[0]) == 1
    assert begun(*ends) == 1
    assert begun(*ends, begin(move("w", "a", "b", 1))) == 0


@pytest.mark.parametrize(
    ("order", "first"), [(Order.SMALLEST, "small"), (Order.LONGEST, "big"), (Order.NAME, "big")]
)
def test_who_goes_first_is_said_by_the_order_and_before_that_by_priority(
    order: Order, first: str
) -> None:
    moves = [move("small", "a", "b", 1), move("big", "a", "b", 8)]
    made = fleet([host("a"), host("b")], *(one.tenant for one in moves))
    one_by_one = Windows(per_source=1, order=order)
    assert played(made, moves, one_by_one).steps[0].move.name == first
    moves.append(move("vip", "a", "b", 4, priority=5))
    made = fleet([host("a"), host("b")], *(one.tenant for one in moves))
    assert played(made, moves, one_by_one).steps[0].move.name == "vip"


def test_who_makes_room_goes_first_whatever_the_order_says() -> None:
    big, small = guest("big", "a", 7), guest("small", "b", 2)
    made = fleet([host("a", closed="emptied"), host("b", 8), host("c", 3)], big, small)
    going = place(made, [big], RULES).going
    moves = [Move(tenant=g.tenant, source=g.tenant.host, target=g.target) for g in going]
    found = played(made, moves)
    assert [one.move.name for one in found.steps] == ["small", "big"]
    assert found.steps[1].begins >= found.steps[0].ends


def test_two_that_want_each_others_place_go_by_a_third() -> None:
    one, other = move("x", "a", "b", 6), move("y", "b", "a", 5)
    made = fleet([host(name, 8) for name in "abc"], one.tenant, other.tenant)
    found = played(made, [one, other])
    assert [(s.move.name, s.move.target, s.detour) for s in found.steps] == [
        ("y", "c", True), ("x", "b", False), ("y", "a", False)
    ]  # fmt: skip


def test_where_there_is_no_third_it_is_said_and_nothing_is_begun() -> None:
    one, other = move("x", "a", "b", 6), move("y", "b", "a", 6)
    found = play(fleet([host("a", 8), host("b", 8)], one.tenant, other.tenant), [one, other],
                 RULES, WIDE)  # fmt: skip
    assert (found.steps, {m.name for m in found.stuck}) == ((), {"x", "y"})


def test_loads_tell_the_most_a_host_holds_on_the_way() -> None:
    moves = [move("x", "a", "b", 4)]
    made = fleet([host("a"), host("b")], moves[0].tenant, guest("there", "b", 2))
    loads = {one.host: one for one in played(made, moves).loads}
    told = {name: (one.before, one.most, one.after) for name, one in loads.items()}
    assert told == {"a": (4 * GIB, 4 * GIB, 0), "b": (2 * GIB, 6 * GIB, 6 * GIB)}


def overfull(made: Fleet, found: Outlook, keep_free: float) -> list[str]:
    """Hosts that hold more at some moment than they may and more than they held in the beginning,
    by the steps alone."""
    memory = {one.name: one.memory * (1 - keep_free) for one in made.places}
    start: dict[str, float] = dict.fromkeys(memory, 0.0)
    for one in made.tenants:
        start[one.host] += one.memory
    events: list[tuple[float, int, str, int]] = []
    for step in found.steps:
        size = step.move.tenant.memory
        events.append((step.begins, 1, step.move.target, size))
        events.append((step.ends, 0, step.move.source, -size))
    held, faults = dict(start), []
    for _, _, name, more in sorted(events):
        held[name] += more
        if more > 0 and held[name] > memory[name] + 1:
            faults.append(name)
    return faults


@given(st.integers(0, 10**6), st.integers(2, 20), st.floats(0.3, 0.9))
@settings(max_examples=60)
def test_no_plan_overfills_a_host_at_any_moment_or_moves_a_guest_twice(
    seed: int, hosts: int, full: float
) -> None:
    rules = Rules(keep_free=0.05)
    made, leaving = random_fleet(seed, hosts, hosts * 8, full=full)
    going = place(made, leaving, rules).going
    moves = [Move(tenant=g.tenant, source=g.tenant.host, target=g.target) for g in going]
    windows = Windows(per_source=3, per_target=2, total=8)
    found = play(made, moves, rules, windows)
    assert overfull(made, found, 0.05) == []
    names = [one.move.name for one in found.steps if not one.detour]
    assert len(names) == len(set(names))
    assert {one.name for one in found.stuck} | set(names) == {one.name for one in moves}
    direct = {one.move.name for one in found.steps} - {
        one.move.name for one in found.steps if one.detour
    }
    where = {g.tenant.name: g.target for g in going}
    assert all(where[s.move.name] == s.move.target for s in found.steps if s.move.name in direct)
    for at in [one.begins for one in found.steps]:
        under = [one for one in found.steps if one.begins <= at < one.ends]
        assert len(under) <= 8
        for side, most in (("source", 3), ("target", 2)):
            for name in {getattr(one.move, side) for one in under}:
                both = [one for one in under if getattr(one.move, side) == name]
                assert len(both) <= most + 1  # one of them was about to end when another began


def gone(leaving: Sequence[Tenant]) -> int:
    return sum(one.memory for one in leaving)


@given(st.integers(0, 10**6))
@example(557)  # a narrow link that was left idle while the source was busy with wide ones
@settings(max_examples=20)
def test_a_plan_takes_little_longer_than_its_bytes_over_the_narrowest_link(seed: int) -> None:
    made, leaving = random_fleet(seed, 8, 60)
    quiet = [guest(one.name, one.host, one.memory / GIB, needs=one.needs) for one in leaving]
    others = tuple(one for one in made.tenants if one.host != "h0")
    made = Fleet(made.places, (*quiet, *others))
    going = place(made, quiet, RULES).going
    moves = [Move(tenant=g.tenant, source=g.tenant.host, target=g.target) for g in going]
    if not moves or any(g.displaced for g in going):
        return
    found = played(made, moves, Windows(per_source=4, per_target=4))
    loads: dict[str, int] = {}
    for one in moves:
        for end in (one.source, one.target):
            loads[end] = loads.get(end, 0) + one.tenant.travels
    bound = max(size / made.place(name).link for name, size in loads.items())
    assert found.total <= 1.15 * bound + 5 * SETUP
