"""What happens in a made-up fleet: who is where, who may go, and what has ended."""

import pytest

from vmckpt.errors import BadInput, Blocked, GuestLocked
from vmckpt.journal.records import RequestKind
from vmckpt.migration.run.actions import Abort, Stop
from vmckpt.model.guest import GuestNow, GuestState
from vmckpt.model.migration import Outcome
from vmckpt.simulation import fleet as fleets
from vmckpt.simulation.migrations import Made
from vmckpt.simulation.world import World

HOSTS, GUESTS = 12, 100


@pytest.fixture
def world() -> World:
    """Nothing moves in it by itself but for the evacuations."""
    return World(fleets.made(HOSTS, GUESTS, 1), 0, 1)


def idle(world: World) -> tuple[GuestNow, str]:
    """A guest that runs and has no job, and a host with room for it."""
    busy = {one.operation.guest for one in world.active(0.0)}
    emptied = {one.host for one in world.empties.values()}
    for guest in world.site.guests.values():
        if guest.state is GuestState.RUNNING and not {guest.name, guest.host} & (busy | emptied):
            for name in world.site.hosts:
                if world.site.why_not(guest, name) is None:
                    return guest, name
    raise AssertionError("all of them are busy")


def order(world: World, at: float) -> Made:
    guest, target = idle(world)
    return world.made(guest, target, fleets.QUIET, at)


def began(world: World) -> float:
    return max(one.operation.began_at for one in world.active(0.0))


def test_a_guest_on_its_way_is_on_both_hosts_and_then_on_one(world: World) -> None:
    now = began(world)
    made = order(world, now)
    id_, name = world.start(made), made.move.guest.name
    there = [one.host for one in world.fleet(now).guests if one.name == name]
    assert sorted(there) == sorted([made.move.guest.host, made.move.target])

    world.to(made.ends)
    there = [one.host for one in world.fleet(made.ends).guests if one.name == name]
    assert there == [made.move.target]
    assert world.past[id_] == made
    assert id_ not in {one.operation.id for one in world.active(made.ends)}


def test_one_that_is_cancelled_stays_and_gives_its_room_back(world: World) -> None:
    now = began(world)
    made = order(world, now)
    free = world.site.hosts[made.move.target].free
    id_ = world.start(made)
    assert world.site.hosts[made.move.target].free == free - made.move.guest.memory
    world.ask(id_, now + 3.0, RequestKind.CANCEL, Abort(Stop.OPERATOR))
    world.to(now + 10.0)

    past = world.past[id_]
    assert isinstance(past, Made)
    assert past.course.outcome is Outcome.CANCELLED
    assert world.site.hosts[made.move.target].free == free
    assert world.site.guests[made.move.guest.name].host == made.move.guest.host


def test_who_has_a_job_gets_no_second_one_and_a_full_host_nobody(world: World) -> None:
    now = began(world)
    made = order(world, now)
    world.start(made)
    with pytest.raises(GuestLocked):
        world.start(made)
    other = order(world, now)
    world.site.close(other.move.target, "new DIMMs")
    with pytest.raises(Blocked, match=other.move.target):
        world.start(other)


def test_a_host_in_maintenance_is_not_emptied_twice(world: World) -> None:
    (one,) = world.empties.values()
    assert one.host in world.held
    with pytest.raises(Blocked):
        world.empty(one.host, began(world), "again")
    with pytest.raises(BadInput):
        world.order(one.id, began(world), RequestKind.BANDWIDTH)


def test_after_an_evacuation_its_host_is_empty_and_all_are_accounted_for(world: World) -> None:
    (one,) = world.empties.values()
    now = began(world)
    while one.id in world.empties:
        now += 5.0
        world.to(now)

    assert not one.left
    assert not world.site.on(one.host)
    assert len(world.site.guests) == GUESTS
    assert {move["guest"] for move in one.moved} == {m["guest"] for m in one.detail["moves"]}


def test_a_failover_moves_a_protected_guest_and_an_end_leaves_it(world: World) -> None:
    (first, one), (second, other) = world.guarded.items()
    now = began(world)
    assert world.unguard(first, now, failover=True) == one.backup
    assert world.unguard(second, now, failover=False) == other.guest.host
    assert world.site.guests[one.guest.name].host == one.backup
    assert world.site.guests[other.guest.name].host == other.guest.host
    assert not world.guarded
