"""Who of those that were stopped is started again, and who must not be."""

from collections.abc import Sequence
from dataclasses import replace

from tests.support.sights import answers, at, by, seen, vm
from vmckpt.evacuation import restart
from vmckpt.evacuation.plan import plan as plans
from vmckpt.evacuation.plan.inventory import Answers
from vmckpt.evacuation.restart import RestartPlan
from vmckpt.evacuation.state import EvacuationTerms
from vmckpt.evacuation.task import Kind, Task
from vmckpt.model.guest import Guest, GuestState
from vmckpt.units import GIB, Bytes

OFF = GuestState.SHUT_OFF


def back(*stopped: str, goes: Sequence[str] = ()) -> Task:
    return Task(
        kind=Kind.REPOPULATE, host="alpha", start=frozenset(f"u-{one}" for one in stopped),
        called=frozenset((f"u-{one}", one) for one in stopped),
        goes=frozenset((f"u-{one}", "alpha") for one in goes),
    )  # fmt: skip


def large(name: str, **more: object) -> Guest:
    return vm(name, memory=Bytes(8 * GIB), **more)


def decided(told: Answers, task: Task) -> RestartPlan:
    return restart.decide(task, seen(told))


def whys(found: RestartPlan) -> dict[str, str]:
    return {one.tenant.name: one.why for one in found.left}


def test_who_is_off_there_is_started_and_who_runs_there_is_not() -> None:
    told = answers(at("alpha", vm("a", state=OFF), vm("b")), at("beta"))
    found = decided(told, back("a", "b"))
    assert (set(found.starts), found.left, found.elsewhere) == ({"u-a"}, (), ())


def test_nobody_is_started_a_second_time() -> None:
    off = vm("a", state=OFF)
    told = answers(at("alpha", off), at("beta", vm("a")))
    found = decided(told, back("a"))
    assert (found.starts, found.left) == ({}, ())
    assert found.elsewhere == ("a is running on beta; not started on alpha",)
    moved = decided(answers(at("alpha"), at("beta", off)), back("a"))
    assert (moved.starts, moved.left) == ({}, ())
    assert "is defined on beta" in moved.elsewhere[0]


def test_who_may_run_on_a_host_that_says_nothing_is_left_and_it_is_said() -> None:
    silent = replace(at("beta"), facts=None, guests=(), error="no answer")
    found = decided(answers(at("alpha", vm("a", state=OFF)), silent), back("a", "gone"))
    assert found.starts == {}
    assert "it may be running on a host that does not answer: beta" in whys(found)["a"]
    assert "no answer from beta" in whys(found)["gone"]
    assert "vmckpt doctor beta" in found.left[0].hint


def test_who_is_defined_nowhere_or_twice_is_left() -> None:
    off = vm("a", state=OFF)
    found = decided(answers(at("alpha", off), at("beta", off)), back("a", "b"))
    assert found.starts == {}
    assert "also defined on another host" in whys(found)["a"]
    assert "it is not defined on any host" in whys(found)["b"]


def test_nobody_is_started_without_room_and_those_that_fit_are() -> None:
    stopped = [large("a", state=OFF), vm("b", state=OFF)]
    told = answers(at("alpha", *stopped, large("c"), free=2 * GIB), at("beta"))
    found = decided(told, back("a", "b"))
    assert set(found.starts) == {"u-b"}
    assert "GiB more free memory" in whys(found)["a"]


def test_who_comes_back_leaves_room_for_who_is_started() -> None:
    told = answers(
        at("alpha", large("a", state=OFF), free=10 * GIB), at("beta", large("g1"), large("g2"))
    )
    task = back("a", goes=("g1", "g2"))
    found = seen(told)
    placement = plans.placed(task.fleet(found), task.asked(found), EvacuationTerms())
    assert placement.going == ()
    plan = plans.made(task, found, placement, plans.NO_CHECKS, EvacuationTerms())
    assert [one.name for one in plan.starts] == ["a"]
    assert plan.starts[0].memory > 8 * GIB


def test_wishes_for_those_who_have_a_choice_keep_nobody_off() -> None:
    own = by("needs: {zone: z9}, apart: [app]")
    pair = [vm(name, state=OFF, labels={"app": "web"}) for name in "ab"]
    told = answers(at("alpha", *pair, free=1 * GIB), at("beta"))
    found = restart.decide(back("a", "b"), seen(told, own))
    assert (set(found.starts), found.left) == ({"u-a", "u-b"}, ())
