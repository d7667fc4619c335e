"""A plan played through: who goes when, by what steps aside, and how full hosts become."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.fleets import GIB, fleet, guest, host, random_fleet
from tests.support.planned_moves import GBIT, RULES, move
from vmckpt.evacuation.bandwidth import SETUP, Move
from vmckpt.evacuation.plan.fleet import Fleet, Rules
from vmckpt.evacuation.plan.forecast import PlanForecast, play
from vmckpt.evacuation.plan.placement import place
from vmckpt.evacuation.schedule import Windows
from vmckpt.policy.model import Order
from vmckpt.units import BytesPerSecond

WIDE = Windows(per_source=8, per_target=8)


def played(
    made: Fleet, moves: Sequence[Move], windows: Windows = WIDE, rules: Rules = RULES
) -> PlanForecast:
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


def overfull(made: Fleet, found: PlanForecast, keep_free: float) -> list[str]:
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
