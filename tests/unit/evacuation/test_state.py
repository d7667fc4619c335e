"""A plan under way: who is tried again, where, and which hosts are left out; in a made-up world."""

from collections.abc import Sequence
from dataclasses import replace

from tests.support.fleets import OFF, TERMS, fleet, guest, host
from vmckpt.evacuation import state as states
from vmckpt.evacuation.bandwidth import Move
from vmckpt.evacuation.plan.fleet import Fleet
from vmckpt.evacuation.state import Failed, Record, RunState
from vmckpt.model.migration import FailureSide
from vmckpt.units import BytesPerSecond


def begun(made: Fleet, *names: str) -> RunState:
    """A course with all guests of a planned, and the first ones under way."""
    asked = frozenset(one.name for one in made.tenants if one.host == "a")
    course = states.planned(RunState(), made, TERMS.rules, 0.0, asked=asked)
    course = states.begins(course, [one for one in course.waiting if one.name in names])
    # So that their links are no reason against others.
    return replace(course, running=tuple(replace(one, ending=True) for one in course.running))


def lost(
    course: RunState, name: str, at: float = 0.0, blame: FailureSide = FailureSide.TARGET
) -> RunState:
    target = next(one.move.target for one in course.running if one.move.name == name)
    failure = Failed(target=target, at=at, why="no room", blame=blame)
    return states.failed(course, name, failure, TERMS.patience)


def waiting(course: RunState) -> dict[str, str]:
    return {one.name: one.target for one in course.waiting}


def test_one_failure_stops_nobody_else_and_is_tried_elsewhere() -> None:
    made = fleet([OFF, host("b"), host("c")], guest("x", "a"), guest("y", "a"))
    course = lost(begun(made, "x", "y"), "x")
    assert [one.move.name for one in course.running] == ["y"]
    first = course.failed["x"][0].target
    after = states.planned(course, made, TERMS.rules, 1.0, asked=frozenset({"x", "y"}))
    assert waiting(after) == {"x": "c" if first == "b" else "b"}


def test_with_a_single_other_host_it_is_tried_there_again() -> None:
    made = fleet([OFF, host("b")], guest("x", "a"))
    course = lost(begun(made, "x"), "x")
    assert waiting(states.planned(course, made, TERMS.rules, 1.0, asked=frozenset({"x"}))) == {
        "x": "b"
    }


def test_it_waits_longer_after_each_failure_and_is_left_after_the_last() -> None:
    made = fleet([OFF, host("b")], guest("x", "a"))
    course = begun(made, "x")
    for number, wait in ((1, 10.0), (2, 20.0)):
        course = lost(course, "x", at=100.0 * number, blame=FailureSide.GUEST)
        assert states.due(course, made, TERMS, 100.0 * number + wait - 0.1) == []
        assert states.wakes(course, 100.0 * number, TERMS.patience) == 100.0 * number + wait
        (move,) = states.due(course, made, TERMS, 100.0 * number + wait)
        course = states.begins(course, [move])
    course = lost(course, "x", at=300.0, blame=FailureSide.GUEST)
    assert course.over
    assert course.left[0].why == "tried 3 times, most recently to b: no room"


def test_a_host_that_fails_everybody_is_left_out_then_tried_with_one() -> None:
    names = [f"vm{number}" for number in range(5)]
    made = fleet([OFF, host("b")], *(guest(name, "a", 1) for name in names))
    course = begun(made, "vm0", "vm1")
    course = lost(course, "vm0", at=1.0)
    assert states.due(course, made, TERMS, 1.0) != []
    course = lost(course, "vm1", at=2.0)
    assert states.due(course, made, TERMS, 30.0) == []
    closed = states.closed(course, made, 30.0).place("b").closed
    assert closed == "2 moves to this host failed; excluded for another 32 s"
    # Then one, and no second one beside it.
    trial = states.due(course, made, TERMS, 62.0)
    assert len(trial) == 1
    course = states.begins(course, trial)
    assert states.due(course, made, TERMS, 62.0) == []
    assert states.closed(course, made, 62.0).place("b").closed == "is being tried with one guest"
    worse = lost(course, trial[0].name, at=63.0)
    assert worse.records["b"].out_until == 63.0 + 120.0
    better = states.succeeded(course, trial[0].name)
    assert better.records["b"] == Record()
    assert states.due(better, _moved(made, trial), TERMS, 63.0) != []


def _moved(made: Fleet, moves: Sequence[Move]) -> Fleet:
    there = {one.name: one.target for one in moves}
    return replace(
        made, tenants=tuple(replace(o, host=there.get(o.name, o.host)) for o in made.tenants)
    )


def test_a_guest_that_fails_everywhere_is_no_fault_of_the_hosts() -> None:
    made = fleet([OFF, host("b")], guest("x", "a"), guest("y", "a"))
    course = lost(begun(made, "x"), "x", blame=FailureSide.GUEST)
    assert course.records == {}


def test_nobody_makes_room_for_one_that_has_failed_once_only() -> None:
    group = frozenset({"g"})
    made = fleet(
        [OFF, host("b"), host("c")], guest("x", "a", apart=group), guest("z", "b", apart=group)
    )
    once = lost(begun(made, "x"), "x")
    assert once.failed["x"][0].target == "c"
    asked = frozenset({"x"})
    after = states.planned(once, made, TERMS.rules, 1.0, asked=asked)
    assert waiting(after) == {"x": "c"}
    twice = lost(states.begins(after, after.waiting), "x")
    after = states.planned(twice, made, TERMS.rules, 100.0, asked=asked)
    assert waiting(after) == {"x": "b", "z": "c"}


def test_streams_that_leave_some_of_the_link_teach_to_send_two_at_once() -> None:
    link = BytesPerSecond(100_000_000)
    made = fleet(
        [host(name, link=link) for name in ("b", "c")] + [host("a", closed="emptied", link=link)],
        *(guest(f"g{number}", "a", 1) for number in range(4)),
    )
    one, *others = sorted(waiting(begun(made)))
    course = begun(made)
    course = states.begins(course, [first for first in course.waiting if first.name == one])
    assert states.due(course, made, TERMS, 0.0) == []
    slow = states.carrying(course, {one: BytesPerSecond(40_000_000)})
    beside = states.due(slow, made, TERMS, 0.0)
    assert len(beside) == 1  # the first one is on its way yet
    after = states.succeeded(slow, one)
    two = states.due(after, made, TERMS, 0.0)
    assert len(two) == 2
    # What two carry beside each other tells nothing of one alone; and it is kept for the next plan.
    both = states.begins(after, two)
    after = states.carrying(both, {two[0].name: BytesPerSecond(90_000_000)})
    assert after is both
    assert after.carried == {"a": 40_000_000}
    asked = frozenset(set(others) - {one.name for one in two})
    again = states.planned(after, made, TERMS.rules, 0.0, asked=asked)
    assert [one.tenant.most for one in again.waiting] == [40_000_000]
    full = states.carrying(slow, {one: BytesPerSecond(96_000_000)})
    assert states.due(full, made, TERMS, 0.0) == []
    assert states.carrying(full, {one: BytesPerSecond(97_000_000)}) is full
    assert len(states.due(states.succeeded(full, one), made, TERMS, 0.0)) == 1


def test_paused_nothing_begins_and_what_is_on_its_way_goes_on() -> None:
    made = fleet([OFF, host("b")], guest("x", "a"), guest("y", "a"))
    course = replace(begun(made, "x"), paused=True)
    assert states.due(course, made, TERMS, 0.0) == []
    assert states.due(replace(course, paused=False), made, TERMS, 0.0) != []


def test_who_finds_no_place_waits_for_a_host_that_is_left_out() -> None:
    made = fleet([OFF, host("b")], guest("x", "a"))
    course = RunState(records={"b": Record(failures=2, outs=1, out_until=60.0)})
    asked = frozenset({"x"})
    hoping = states.planned(course, made, TERMS.rules, 1.0, asked=asked)
    assert (hoping.left, len(hoping.hoping), hoping.over) == ((), 1, False)
    assert states.wakes(course, 1.0, TERMS.patience) == 60.0
    assert waiting(states.planned(course, made, TERMS.rules, 60.0, asked=asked)) == {"x": "b"}
