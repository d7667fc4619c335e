"""When snapshots are verified: each depth by itself, and all of a schedule."""

import itertools
from dataclasses import replace

from tests.support.schedules import BEGIN, DAY, DB, World, order
from vmckpt.policy.model import Check, Keep, Proof
from vmckpt.scheduler.jobs import VerifySnapshots
from vmckpt.units import Seconds


def test_who_looks_at_one_by_hand_does_not_put_off_the_others() -> None:
    world = World([order("1d", keep=Keep(last=30), verify=Proof(every=Seconds(7 * DAY)))])
    for _ in range(20):
        world.play(DAY)
        newest = max(world.stores["near"].values(), key=lambda held: held.kept.made_at)
        world.stores["near"][newest.kept.id] = replace(newest, looked_at={"sealed": world.now})
    found = [(at - BEGIN) / DAY for at in world.times(VerifySnapshots)]
    assert found[0] < 1
    gaps = [late - early for early, late in itertools.pairwise(found)]
    assert len(gaps) == 2
    assert all(6.9 < gap < 8.1 for gap in gaps), gaps


def test_a_depth_that_fails_keeps_no_other_from_its_turn() -> None:
    deep, plain = Proof(every=Seconds(DAY), depth=Check.DEEP), Proof(every=Seconds(DAY))
    world = World([order("1d", verify=deep), order("1d", DB, verify=plain)])
    world.fails = lambda one: isinstance(one, VerifySnapshots) and one.depth is Check.DEEP
    world.play(3 * DAY)
    done = [one.depth for _, one in world.log if isinstance(one, VerifySnapshots)]
    assert Check.SEALED in done


def test_what_cannot_be_opened_for_want_of_a_key_is_not_looked_at_after_each_restart() -> None:
    deep = Proof(every=Seconds(7 * DAY), depth=Check.DEEP)
    world = World([order("1d", keep=Keep(last=30), verify=deep)], opens=False)
    for _ in range(20):
        world.play(DAY)
        world.restart()
    assert len(world.times(VerifySnapshots)) == 3
    # Once there is a key it is another matter.
    world.opens = True
    world.play(1.0)
    assert len(world.times(VerifySnapshots)) == 4
