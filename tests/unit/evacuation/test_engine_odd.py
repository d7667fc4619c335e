"""Runs among hosts that fall silent and guests that are stopped, stuck, or moved by others."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.evacuation_runs import GOOD, ORDER, USUAL, Hosts, failing, hosts, run
from tests.support.fake_drivers import FakeDesk
from tests.support.sights import answers, at, by, seen, vm
from vmckpt.errors import Blocked, Cancelled
from vmckpt.evacuation.engine import Run
from vmckpt.evacuation.interfaces import Moved, MoveEnd, Turn
from vmckpt.evacuation.plan.inventory import FleetView, Known, Protected, TravelMethod
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task, terms
from vmckpt.journal.records import RequestKind
from vmckpt.model.guest import GuestJob, GuestState
from vmckpt.model.migration import FailureSide, Outcome
from vmckpt.units import GIB, Bytes, Seconds

pytestmark = pytest.mark.looptime(end=20000)
MAKES_ROOM = by("keep_free: 1%, displace: true, at_once: {source: 2, target: 2}")


def outcome(ended: MoveEnd, order: Task = ORDER) -> Outcome:
    return Report(task=order, job="e-1", ended=ended).outcome


def left(ended: MoveEnd) -> dict[str, str]:
    return {one.tenant.name: one.why for one in ended.left}


def after(seconds: float) -> asyncio.Event:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    return stop


async def test_of_a_host_that_is_silent_from_the_first_look_on_nothing_is_claimed() -> None:
    world = hosts(vm("a"), silent={"alpha"})
    with pytest.raises(Blocked, match="no longer answers; no move was started"):
        await run(world)
    assert not world.moves
    with pytest.raises(Cancelled):
        await run(world, stop=after(7.0))


async def test_a_host_that_answers_again_is_emptied() -> None:
    world = hosts(vm("a"), silent={"alpha"})
    world.after_look = lambda one: one.silent.clear() if one.looks > 3 else None
    assert outcome(await run(world)) is Outcome.COMPLETED
    assert world.names["alpha"] == []


async def test_who_was_not_shut_down_before_it_was_stopped_is_left() -> None:
    quiet = by("strategy: shutdown-and-return", name="quiet")
    world = hosts(vm("a"), vm("b"), own={"b": quiet})
    ended = await run(world, stop=after(2.0))
    assert world.names == {"alpha": ["b"], "beta": ["a"], "gamma": []}
    assert left(ended) == {"b": "the run stopped before the guest was shut down or suspended"}
    assert outcome(ended) is Outcome.CANCELLED


async def test_who_moves_on_somebody_elses_account_is_left_if_it_was_stopped_before_that() -> None:
    ended = await run(hosts(vm("a", job=GuestJob.OUTGOING)), stop=after(20.0))
    assert list(left(ended)) == ["a"]
    assert outcome(ended) is Outcome.CANCELLED


async def test_who_may_be_on_a_silent_host_is_not_back() -> None:
    world = hosts(silent={"beta"})
    world.guests |= {"beta": [vm("a")], "gamma": [vm("b")]}
    back = Task(
        kind=Kind.REPOPULATE, host="alpha", called=frozenset({("u-a", "a")}),
        goes=frozenset((one, "alpha") for one in ("u-a", "u-b")),
    )  # fmt: skip
    ended = await run(world, back)
    assert [one.guest for one in ended.arrived] == ["b"]
    assert left(ended) == {"a": "not found; no answer from beta"}
    assert outcome(ended, back) is Outcome.FAILED


async def test_a_guest_in_two_parts_that_was_given_up_does_not_keep_the_run_from_ending() -> None:
    world = hosts(vm("a"), vm("b"))
    usual = world.move

    async def move(known: Known, target: str, turn: Turn) -> Moved:
        if known.name != "a":
            return await usual(known, target, turn)
        await turn.wait()
        parts = replace(vm("a"), state=GuestState.PAUSED)
        world.guests["alpha"] = [
            replace(parts, job=GuestJob.OUTGOING) if one.name == "a" else one
            for one in world.guests["alpha"]
        ]
        world.guests[target].append(parts)
        return Moved(good=False, why="the stream is broken", final="see vmckpt job m-1")

    world.move = move  # type: ignore[method-assign]
    ended = await run(world)
    assert not ended.stopped
    assert left(ended) == {"a": "the stream is broken"}


@pytest.mark.parametrize(
    ("came", "tries"), [({"final": "see vmckpt job"}, 1), ({"blame": FailureSide.GUEST}, 3)]
)
async def test_who_was_to_make_room_and_was_given_up_is_not_asked_again(
    came: dict[str, object], tries: int
) -> None:
    world = hosts(vm("a", memory=Bytes(6 * GIB)), fate=failing(("b", "*", -1), **came))
    world.guests["beta"] = [vm("b", memory=Bytes(4 * GIB))]
    world.free = {"alpha": 0, "beta": 4 * GIB, "gamma": 5 * GIB}
    limits = terms(MAKES_ROOM.evacuation, Kind.EVACUATE)
    going = Run(world, ORDER, limits, after(10000), tell=lambda _: None)
    ended = await going.through(None)
    assert not ended.stopped
    assert len(world.moves) == tries
    assert list(left(ended)) == ["a"]


class _Guarded(Hosts):
    """A guest that goes, and a standby whose guest gets another while that is looked at."""

    near: frozenset[str] = frozenset()
    held: dict[str, Protected]

    async def look(self) -> FleetView:
        await asyncio.sleep(0.3)
        looks = [at(name, *found, free=8 * GIB) for name, found in self.guests.items()]
        return seen(answers(*looks, protected=dict(self.held)), by("keep_free: 1%"), self.own,
                    emptied="alpha")  # fmt: skip

    async def move(self, known: Known, target: str, turn: Turn) -> Moved:
        await turn.wait()
        if known.way is not TravelMethod.ANEW:
            await asyncio.sleep(3)
            self.near = frozenset({known.name})  # the standby's turn comes meanwhile
            await asyncio.sleep(3)
            self.near = frozenset()
            self.go(known.guest.name, target)
            return GOOD
        await asyncio.sleep(1)
        uuid = known.guest.uuid
        self.guests["alpha"] = [one for one in self.guests["alpha"] if one.uuid != uuid]
        old = self.held.pop(uuid)
        await asyncio.sleep(9)
        self.guests[target].append(known.guest)
        self.held[uuid] = replace(old, backup=target)
        return Moved(good=True, job="p-2", took=Seconds(10.0))

    def nearing(self) -> frozenset[str]:
        return self.near


async def test_a_standby_that_is_moved_is_told_as_one_whatever_is_seen_meanwhile() -> None:
    whose = vm("s")
    world = _Guarded(
        {"alpha": [vm("g"), replace(whose, state=GuestState.STANDBY)], "beta": [whose], "gamma": []}
    )
    world.held = {"u-s": Protected(primary="beta", backup="alpha", job="p-1")}
    ended = await run(world)
    assert [(one.uuid, one.standby) for one in ended.arrived] == [("u-g", False), ("u-s", True)]


@pytest.mark.parametrize("guest", ["without a host", "on its way"])
async def test_a_host_that_falls_silent_is_not_waited_for_forever(guest: str) -> None:
    leaves, big = vm("x", job=GuestJob.OUTGOING), vm("x", memory=Bytes(60 * GIB))
    other = leaves if guest == "on its way" else big
    world = hosts(vm("a"), other)

    def falls_silent(one: Hosts) -> None:
        if one.names["beta"] or one.names["gamma"]:
            one.silent.add("alpha")

    world.after_look = falls_silent
    began = asyncio.get_running_loop().time()
    ended = await run(world, stop=after(10000))
    assert not ended.stopped
    assert asyncio.get_running_loop().time() - began < 400
    assert list(left(ended)) == ["x"]
    if guest == "on its way":
        assert left(ended) == {"x": "alpha no longer answers"}


async def test_whoever_goes_on_with_it_knows_how_it_stood() -> None:
    marks: list[str] = []

    async def through(stop: asyncio.Event, step_log: FakeDesk | None = None) -> None:
        world, limits = hosts(*(vm(f"w{n}") for n in range(4))), terms(USUAL.evacuation, ORDER.kind)
        going = Run(
            world, ORDER, limits, stop, tell=lambda _: None, step_log=step_log, mark=marks.append
        )
        await going.through(None)

    for last, stands in ((RequestKind.GO_ON, ""), (RequestKind.CANCEL, "stopping")):
        now = asyncio.get_running_loop().time()
        step_log = FakeDesk([(now + 2.0, RequestKind.PAUSE, {}), (now + 50.0, last, {})])
        await through(asyncio.Event(), step_log)
        assert marks == ["paused", stands]
        marks.clear()
    await through(after(2.0))  # by a signal: whose machine goes down wants it gone on with
    assert marks == []


async def test_a_guest_that_somebody_starts_there_meanwhile_is_seen_in_a_long_run() -> None:
    world = hosts(*(vm(f"w{number}", memory=Bytes(4 * GIB)) for number in range(40)))
    world.free = {"alpha": 0, "beta": 60 * GIB, "gamma": 60 * GIB}

    def appears(one: Hosts) -> None:
        if len(one.moves) > 4 and one.free["beta"]:
            one.free["beta"] = 0
            before.append(len(one.names["beta"]))

    before: list[int] = []
    world.after_look = appears
    ended = await run(world, stop=after(10000))
    assert len(before) == 1
    assert len(world.names["beta"]) <= before[0] + 2  # who was on his way
    assert ended.left


@pytest.mark.parametrize("kind", [Kind.EVACUATE, Kind.REPOPULATE])
async def test_a_host_that_misses_one_look_of_a_long_run_loses_nobody(kind: Kind) -> None:
    guests = [vm(f"w{number}") for number in range(30)]
    world = hosts(*guests) if kind is Kind.EVACUATE else hosts()
    order = ORDER
    if kind is Kind.REPOPULATE:
        world.guests["beta"] = guests
        goes = frozenset((one.uuid, "alpha") for one in guests)
        order = Task(kind=kind, host="alpha", goes=goes)
    began = asyncio.get_running_loop().time()
    missed: list[int] = []

    def misses(one: Hosts) -> None:
        if asyncio.get_running_loop().time() - began > 60 and len(missed) < 2:
            missed.append(one.looks)
        one.silent = {"beta"} if missed == [one.looks] else set()

    world.after_look = misses
    ended = await run(world, order, stop=after(10000))
    assert len(missed) == 2
    assert (len(ended.arrived), left(ended)) == (30, {})


async def test_the_host_may_be_away_for_a_moment_however_many_fail_meanwhile() -> None:
    world = hosts(*(vm(f"w{number}") for number in range(12)))
    usual, began = world.move, asyncio.get_running_loop().time()

    def away() -> bool:
        return 14 < asyncio.get_running_loop().time() - began < 25

    async def move(known: Known, target: str, turn: Turn) -> Moved:
        if not away():
            return await usual(known, target, turn)
        await turn.wait()
        await asyncio.sleep(0.1)
        return Moved(good=False, why="alpha: connection refused", blame=FailureSide.GUEST)

    def silent(one: Hosts) -> None:
        one.silent = {"alpha"} if away() else set()

    world.move = move  # type: ignore[method-assign]
    world.after_look = silent
    ended = await run(world, stop=after(10000))
    assert left(ended) == {}
