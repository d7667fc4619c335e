"""A run against hosts that a test plays: who is moved, tried again, left, and when it ends."""

import asyncio
from collections.abc import Iterable

import pytest

from tests.support.evacuation_runs import Hosts, failing, hosts, run
from tests.support.fake_drivers import FakeDesk
from tests.support.following import take
from tests.support.sights import by, vm
from vmckpt.evacuation import state
from vmckpt.evacuation.interfaces import Moved
from vmckpt.evacuation.task import Kind, Task
from vmckpt.journal.records import RequestKind
from vmckpt.model.guest import GuestJob
from vmckpt.model.migration import FailureSide
from vmckpt.units import GIB

pytestmark = pytest.mark.looptime(end=3000)


async def test_all_are_moved_and_the_host_is_looked_at_in_the_end() -> None:
    world, told = hosts(*(vm(f"w{number}") for number in range(5))), list[str]()
    ended = await run(world, told=told)
    assert world.names["alpha"] == []
    assert not ended.left
    assert sorted(one.guest for one in ended.arrived) == ["w0", "w1", "w2", "w3", "w4"]
    assert {one.uuid for one in ended.arrived} == {f"u-w{number}" for number in range(5)}
    assert world.most <= 2
    assert len(world.moves) == 5
    assert world.looks == 2
    assert told[-1].endswith("5 of 5")


async def test_a_failure_goes_elsewhere_and_stops_nobody() -> None:
    world = hosts(vm("a"), vm("b"), fate=failing(("a", "beta", -1)), free={"gamma": 2 * GIB})
    ended = await run(world)
    assert not ended.left
    assert world.moves.count(("a", "beta")) <= 1
    assert world.names["alpha"] == []


async def test_tries_are_bounded_and_it_is_said_why_it_is_left() -> None:
    world = hosts(vm("a"), vm("b"), fate=failing(("a", "*", -1)))
    ended = await run(world)
    assert [(one.tenant.name, one.why) for one in ended.left] == [
        ("a", f"tried 3 times, most recently to {world.moves[-1][1]}: the connection was reset")
    ]
    assert [one for one, _ in world.moves].count("a") == 3
    assert world.names["alpha"] == ["a"]


async def test_what_nobody_knows_the_end_of_is_not_tried_again() -> None:
    fate = failing(("a", "*", -1), why="unknown", final="run vmckpt recover")
    world = hosts(vm("a"), vm("b"), fate=fate)
    ended = await run(world)
    assert [(one.tenant.name, one.hint) for one in ended.left] == [("a", "run vmckpt recover")]
    assert [one for one, _ in world.moves].count("a") == 1


async def test_a_host_that_fails_everybody_is_left_out() -> None:
    world = hosts(*(vm(f"w{number}") for number in range(6)), fate=failing(("*", "beta", -1)))
    ended = await run(world)
    assert not ended.left
    assert world.names["gamma"] == [f"w{number}" for number in range(6)]
    assert [target for _, target in world.moves].count("beta") <= 3


async def test_a_guest_that_does_not_converge_is_not_its_targets_fault() -> None:
    world = hosts(
        *(vm(f"w{n}") for n in range(3)), fate=failing(("w0", "*", 0), blame=FailureSide.GUEST)
    )
    ended = await run(world)
    assert not ended.left
    assert [one for one, _ in world.moves].count("w0") == 2


async def test_stopped_what_is_on_its_way_arrives_and_nothing_new_begins() -> None:
    world, stop = hosts(*(vm(f"w{number}") for number in range(6))), asyncio.Event()
    asyncio.get_running_loop().call_later(2.0, stop.set)
    ended = await run(world, stop=stop)
    assert ended.stopped
    begun = [one for one, _ in world.moves]
    assert sorted(one.guest for one in ended.arrived) == sorted(begun)
    assert {one.tenant.name for one in ended.left} == {f"w{n}" for n in range(6)} - set(begun)
    assert all(one.hint.startswith("run vmckpt ") for one in ended.left)
    assert all(one.hint.endswith(" again") for one in ended.left)


async def test_a_balance_that_was_stopped_is_continued_by_the_command_of_its_hint() -> None:
    def order(kind: Kind, names: Iterable[str]) -> Task:
        return Task(kind=kind, goes=frozenset((f"u-{name}", "beta") for name in names))

    names = [f"w{number}" for number in range(6)]
    world, stop = hosts(*map(vm, names)), asyncio.Event()
    asyncio.get_running_loop().call_later(2.0, stop.set)
    ended = await run(world, order(Kind.BALANCE, names), stop=stop)
    late = {one.tenant.name for one in ended.left}
    ((_, kind),) = {one.words for left in ended.left for one in take(left.hint)}
    again = await run(world, order(Kind(kind), late))
    assert (again.left, {one.guest for one in again.arrived}) == ((), late)


async def test_the_next_ones_are_made_ready_while_others_move() -> None:
    world = hosts(*(vm(f"w{number}") for number in range(8)), preflight=4.0)
    ended = await run(world)
    assert not ended.left
    # Over one link one after the other, 5 s each; only the first one waits for its preflight.
    assert ended.took < 8 * 5 + 4 + 3


async def test_while_nothing_changes_nobody_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of guests that is more than a look at who has ended, twice a second."""
    asked: list[str] = []

    def counted(name: str) -> None:
        really = getattr(state, name)

        def one(*args: object) -> object:
            asked.append(name)
            return really(*args)

        monkeypatch.setattr(state, name, one)

    counted("due")
    counted("next_ones")
    ended = await run(hosts(*(vm(f"w{number}") for number in range(5)), preflight=1.0))
    assert ended.took > 25
    assert len(asked) <= 2 * 2 * len(ended.arrived)


async def test_stopped_who_is_ready_is_told_that_its_turn_does_not_come() -> None:
    world, stop = hosts(*(vm(f"w{number}") for number in range(6))), asyncio.Event()
    asyncio.get_running_loop().call_later(3.0, stop.set)
    ended = await run(world, stop=stop)
    assert len(world.dismissed) == 2
    assert {one.tenant.name for one in ended.left} >= set(world.dismissed)
    assert not {one for one, _ in world.moves} & set(world.dismissed)


async def test_who_cannot_move_is_known_before_its_turn_and_keeps_nobody() -> None:
    bad = {("w3", "beta"), ("w3", "gamma")}
    world = hosts(*(vm(f"w{number}") for number in range(4)), impossible=bad)
    ended = await run(world)
    assert [(one.tenant.name, one.why) for one in ended.left] == [("w3", "preflight says no")]
    assert world.names["alpha"] == ["w3"]


async def test_paused_nothing_new_begins_until_it_goes_on() -> None:
    world = hosts(*(vm(f"w{number}") for number in range(4)))
    step_log = FakeDesk([(2.0, RequestKind.PAUSE, {}), (100.0, RequestKind.GO_ON, {})])
    ended = await run(world, step_log=step_log)
    assert not ended.left
    assert [ok for _, ok, _ in step_log.answers] == [True, True]
    assert 100 < ended.took < 140


async def test_cancelled_from_another_terminal_while_paused() -> None:
    world = hosts(*(vm(f"w{number}") for number in range(4)))
    step_log = FakeDesk([(2.0, RequestKind.PAUSE, {}), (50.0, RequestKind.CANCEL, {})])
    ended = await run(world, step_log=step_log)
    assert ended.stopped
    assert ended.took < 60


async def test_what_is_asked_of_a_guest_is_not_asked_of_the_host() -> None:
    step_log = FakeDesk([(1.0, RequestKind.POSTCOPY, {})])
    await run(hosts(vm("a")), step_log=step_log)
    told = "send this request to the migration job of one guest"
    assert step_log.answers == [("postcopy", False, told)]


async def test_a_guest_that_moves_on_its_own_account_is_waited_for() -> None:
    world = hosts(vm("a", job=GuestJob.OUTGOING), vm("b"))

    def leaves(world: Hosts) -> None:
        if asyncio.get_running_loop().time() > 60 and "a" in world.names["alpha"]:
            world.go("a", "gamma")

    world.after_look = leaves
    ended = await run(world)
    assert not ended.left
    assert [one for one, _ in world.moves] == ["b"]
    assert ended.took > 60


async def test_a_host_that_stops_answering_loses_no_guest_from_sight() -> None:
    world = hosts(*(vm(f"w{number}") for number in range(4)))
    bad = failing(("*", "*", 0))

    def fate(guest: str, target: str, tries: int) -> Moved:
        loop = asyncio.get_running_loop()
        world.silent = {"alpha"} if loop.time() < 60 else set()
        return bad(guest, target, tries)

    world.fate = fate
    ended = await run(world)
    assert not ended.left
    assert world.names["alpha"] == []


async def test_a_guest_that_appears_meanwhile_is_moved_too() -> None:
    world = hosts(vm("a"))

    def appears(world: Hosts) -> None:
        if world.looks == 2:
            world.guests["alpha"].append(vm("late"))

    world.after_look = appears
    ended = await run(world)
    assert sorted(one.guest for one in ended.arrived) == ["a", "late"]


async def test_shut_down_comes_last_and_what_does_not_is_left() -> None:
    quiet = by("strategy: shutdown-and-return", name="quiet")
    world = hosts(vm("a"), vm("b"), own={"b": quiet})
    ended = await run(world)
    assert ended.shut_down == ("u-b",)
    assert not ended.left
    assert ended.took > 8
    stubborn = hosts(vm("b"), own={"b": quiet}, stubborn=True)
    ended = await run(stubborn)
    assert [one.why for one in ended.left] == ["it did not shut down within 2 min"]
    assert stubborn.names["alpha"] == ["b"]


async def test_who_is_to_be_suspended_is_told_of_in_these_words() -> None:
    told: list[str] = []
    kept = by("strategy: suspend-to-snapshot", name="kept")
    ended = await run(hosts(vm("a"), vm("b"), own={"b": kept}), told=told)
    assert ended.shut_down == ("u-b",)
    assert told[-2:] == ["b: is being suspended, as its policy requires", "b: is saved"]


async def test_paused_nobody_is_shut_down_either() -> None:
    quiet = by("strategy: shutdown-and-return", name="quiet")
    step_log = FakeDesk([(2.0, RequestKind.PAUSE, {}), (100.0, RequestKind.GO_ON, {})])
    ended = await run(hosts(vm("a"), vm("b"), own={"b": quiet}), step_log=step_log)
    assert ended.shut_down == ("u-b",)
    assert [ok for _, ok, _ in step_log.answers] == [True, True]
    assert 100 < ended.took < 120


async def test_cancelled_while_paused_nobody_is_shut_down() -> None:
    quiet = by("strategy: shutdown-and-return", name="quiet")
    step_log = FakeDesk([(2.0, RequestKind.PAUSE, {}), (50.0, RequestKind.CANCEL, {})])
    world = hosts(vm("a"), vm("b"), own={"b": quiet})
    ended = await run(world, step_log=step_log)
    assert (ended.stopped, ended.shut_down, world.names["alpha"]) == (True, (), ["b"])


async def test_brought_back_one_after_the_other() -> None:
    world = hosts()
    world.guests["beta"] = [vm("a"), vm("b"), vm("stranger")]
    back = Task(
        kind=Kind.REPOPULATE,
        host="alpha",
        goes=frozenset((uuid, "alpha") for uuid in ("u-a", "u-b", "u-gone")),
    )
    ended = await run(world, back)
    assert not ended.left
    assert world.names == {"alpha": ["a", "b"], "beta": ["stranger"], "gamma": []}


async def test_with_nowhere_to_go_it_ends_at_once() -> None:
    world = hosts(vm("a"), free={"beta": 0, "gamma": 0})
    ended = await run(world)
    assert not ended.arrived
    assert "of memory" in ended.left[0].why
    assert ended.took < 5
