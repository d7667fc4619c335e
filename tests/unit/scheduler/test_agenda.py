"""What schedules ask for, played for weeks against stores that are only sets."""

from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from tests.support.schedules import BEGIN, DAY, DB, HOUR, WEB, World, order
from vmckpt.errors import BadInput, CaptureFailed, GuestLocked, VmckptError
from vmckpt.model.guest import GuestState
from vmckpt.policy.model import Check, CopyTo, Keep, Proof
from vmckpt.scheduler.agenda import (
    COLLECT,
    Held,
    Trouble,
    agenda,
    needs_recovery,
    troubled,
)
from vmckpt.scheduler.jobs import (
    CollectGarbage,
    CopySnapshot,
    CreateGroup,
    CreateSnapshot,
    VerifySnapshots,
)
from vmckpt.units import Seconds

BERLIN = ZoneInfo("Europe/Berlin")


def test_two_weeks_of_every_hour_with_two_tiers() -> None:
    keep = Keep(last=4)
    far = CopyTo(store="far", keep=Keep(daily=7))
    world = World([order("1h", keep=keep, copies=(far,))])
    world.play(14 * DAY)

    assert len(world.times(CreateSnapshot)) == 14 * 24
    assert len(world.stores["near"]) == 4
    days = sorted({int(one.kept.made_at // DAY) for one in world.stores["far"].values()})
    assert (len(world.stores["far"]), len(days)) == (7, 7)
    # Each was copied once, and nothing went to and fro.
    copied = [one.id for _, one in world.log if isinstance(one, CopySnapshot)]
    assert len(copied) == len(set(copied)) == 14 * 24
    assert len(world.times(CollectGarbage)) == 2 * 14 * DAY / COLLECT


def test_what_was_missed_is_made_up_for_once() -> None:
    world = World([order("daily 03:00")])
    world.play(3 * DAY)
    before = len(world.times(CreateSnapshot))
    world.now += 2 * DAY  # the service is off
    world.restart()
    world.play(1.0)

    assert before == 4  # one at once, as there was none, and three at night
    assert len(world.times(CreateSnapshot)) == before + 1
    world.play(DAY)
    assert world.local(CreateSnapshot)[-2:] == ["07 12:00", "08 03:00"]


def test_a_restart_does_nothing_twice() -> None:
    world = World([order("1h", verify=Proof(every=Seconds(DAY)))])
    world.play(5 * HOUR + 60)
    count = len(world.log)
    world.restart()
    world.play(60)

    assert {type(one) for _, one in world.log[count:]} == {CollectGarbage}


def test_days_on_which_clocks_are_put_on_and_back() -> None:
    world = World([order("daily 02:30")], zone=BERLIN)
    world.now = datetime(2026, 3, 27, 12, tzinfo=BERLIN).timestamp()
    world.play(4 * DAY)
    assert world.local(CreateSnapshot)[1:] == ["28 02:30", "29 03:30", "30 02:30", "31 02:30"]

    world = World([order("daily 02:30")], zone=BERLIN)
    world.now = datetime(2026, 10, 23, 12, tzinfo=BERLIN).timestamp()
    world.play(3 * DAY)
    assert world.local(CreateSnapshot)[1:] == ["24 02:30", "25 02:30", "26 02:30"]


@pytest.mark.parametrize("step", [-3 * DAY, -90.0, 90.0, 3 * DAY])
def test_a_clock_that_steps_makes_one_snapshot_too_many_at_most(step: float) -> None:
    world = World([order("1h", keep=Keep(last=3))])
    world.play(10 * HOUR)
    before = len(world.times(CreateSnapshot))
    world.now += step
    world.play(1.0)

    assert len(world.times(CreateSnapshot)) - before <= 1
    world.play(10 * HOUR)
    assert len(world.times(CreateSnapshot)) - before in (10, 11)


def test_a_host_whose_clock_is_ahead_does_not_make_it_take_one_after_the_other() -> None:
    world = World([order("1h")], ahead=2 * HOUR)
    world.play(10 * HOUR)

    assert len(world.times(CreateSnapshot)) == 10


def test_a_guest_that_cannot_be_taken_stops_no_other_and_is_tried_less_and_less() -> None:
    world = World([order("10min"), order("10min", DB)])
    world.fails = lambda one: isinstance(one, CreateSnapshot) and one.guest == "d"
    world.play(DAY)

    assert len(world.times(CreateSnapshot)) == 6 * 24
    tried = world.times(CreateSnapshot, "d")
    gaps = [round(b - a) for a, b in pairwise(tried)]
    assert gaps[:8] == [30, 60, 120, 240, 480, 960, 1920, 3600]
    assert set(gaps[8:]) == {3600}
    [_, row] = agenda(world.scene).rows
    assert row.why == f"failed {len(tried)} times; will be retried"


def test_a_store_that_is_away_loses_nothing_and_all_is_made_up_for() -> None:
    far = CopyTo(store="far", keep=Keep(last=100))
    world = World([order("1h", keep=Keep(last=3), copies=(far,))])
    world.play(5 * HOUR)
    world.down = {"far"}
    world.play(20 * HOUR)

    assert len(world.stores["near"]) == 3 + 20, "what is not copied stays"
    told = agenda(world.scene)
    assert told.next is not None, "who waits for a store does not look all the time"
    assert told.next > world.now
    world.down = set()
    world.play(60)
    assert len(world.stores["far"]) == 26  # one more was due meanwhile
    assert len(world.stores["near"]) == 3


def test_while_the_near_store_is_away_nothing_is_taken_and_then_one() -> None:
    world = World([order("1h"), replace(order("1h", DB), store="far")])
    world.play(2 * HOUR)
    world.down = {"near"}
    world.play(5 * HOUR)

    assert (len(world.times(CreateSnapshot)), len(world.times(CreateSnapshot, "d"))) == (2, 7)
    assert agenda(world.scene).rows[0].why == "store near cannot be read"
    world.down = set()
    world.play(60)
    assert len(world.times(CreateSnapshot)) == 3


def test_one_that_cannot_be_copied_does_not_hold_up_the_others() -> None:
    far = CopyTo(store="far", keep=Keep())
    world = World([order("1h", keep=Keep(last=2), copies=(far,))])
    world.fails = lambda one: isinstance(one, CopySnapshot) and one.id == "s-2"
    world.play(10 * HOUR)

    assert set(world.stores["far"]) == {f"s-{n}" for n in range(1, 11)} - {"s-2"}
    assert set(world.stores["near"]) == {"s-2", "s-9", "s-10"}


def test_it_never_deletes_what_is_not_its_own() -> None:
    world = World([order("1h", keep=Keep(last=2)), order("2h", name="other")])
    world.put("by-hand", BEGIN - DAY, schedule=None)
    world.put("another", BEGIN - DAY, schedule="gone")
    world.put("stranger", BEGIN - DAY, guest="x")
    world.put("pinned", BEGIN - DAY)
    held = world.stores["near"]["pinned"]
    world.stores["near"]["pinned"] = Held(kept=replace(held.kept, pinned=True))
    world.play(2 * DAY)

    assert {"by-hand", "another", "stranger", "pinned"} < set(world.stores["near"])
    assert len([one for one in world.stores["near"].values() if one.kept.schedule == "other"]) == 24


def test_verifying_comes_every_so_often_and_a_damaged_one_is_no_kept_one() -> None:
    world = World([order("1d", keep=Keep(last=2), verify=Proof(every=Seconds(2 * DAY)))])
    world.play(2 * DAY - 60)
    first, second = world.stores["near"].values()
    assert [round((at - BEGIN) / DAY) for at in world.times(VerifySnapshots)] == [0]
    assert first.kept.good is True
    # The second one turns out damaged: then the first, which was proved, is the last good one.
    world.stores["near"][second.kept.id] = replace(second, kept=replace(second.kept, good=False))
    world.play(3 * DAY)
    left = [one.kept.id for one in world.stores["near"].values()]
    assert second.kept.id not in left
    assert len(left) >= 2


def test_the_last_good_one_is_never_pruned_however_many_unknown_ones_follow() -> None:
    world = World([order("1h", keep=Keep(last=2))])
    world.put("proved", BEGIN - DAY)
    held = world.stores["near"]["proved"]
    world.stores["near"]["proved"] = Held(kept=replace(held.kept, good=True))
    world.play(5 * DAY)

    assert "proved" in world.stores["near"]
    assert len(world.stores["near"]) == 3


def test_a_check_that_cannot_be_written_down_is_not_made_again_and_again() -> None:
    world = World([order("1h", verify=Proof(every=Seconds(DAY), depth=Check.DEEP))])
    world.play(60)
    world.stores["near"] = {
        id_: replace(held, looked_at={}) for id_, held in world.stores["near"].items()
    }
    world.play(HOUR)

    assert len(world.times(VerifySnapshots)) == 1


def test_a_guest_that_is_off_or_out_of_sight_is_left_alone_and_said_so() -> None:
    off, away = replace(WEB, state=GuestState.SHUT_OFF), replace(DB, seen=False)
    world = World([order("1h", off), order("1h", away)])
    world.play(HOUR)

    assert [type(one) for _, one in world.log if not isinstance(one, CollectGarbage)] == []
    assert [row.why for row in agenda(world.scene).rows] == [
        "the guest is shut off", "beta does not answer",
    ]  # fmt: skip


def test_of_one_lane_only_one_is_at_work() -> None:
    here = replace(DB, host="alpha")
    world = World([order("1h"), order("1h", here)])
    both = agenda(world.scene)
    assert len([one for one in both.work if isinstance(one, CreateSnapshot)]) == 1
    busy = agenda(replace(world.scene, busy=frozenset({"host alpha", "collect near"})))
    assert [str(one) for one in busy.work] == ["garbage collection in far"]


def test_a_wait_that_a_clock_put_back_made_endless_ends() -> None:
    world = World([order("1h")])
    key = CreateSnapshot.key_of("w", "auto")
    world.troubles[key] = Trouble(times=3, until=BEGIN + DAY, why="no")

    assert any(isinstance(one, CreateSnapshot) for one in agenda(world.scene).work)


def marked(error: VmckptError, **marks: bool) -> VmckptError:
    """The error with these attributes."""
    vars(error).update(marks)
    return error


@pytest.mark.parametrize(
    ("error", "needed"),
    [
        (marked(GuestLocked("the job was interrupted"), interrupted=True), True),
        (GuestLocked("a live job", hint="if its controller has died, run vmckpt recover"), False),
        (marked(CaptureFailed("some changes remain"), undone=False), True),
        (CaptureFailed("nothing was changed"), False),
        (BadInput("no such guest", hint="run vmckpt recover"), False),
        (RuntimeError("run vmckpt recover"), False),
    ],
)
def test_only_an_interrupted_job_or_one_that_was_not_undone_is_recovered(
    error: Exception, needed: bool
) -> None:
    assert needs_recovery(error) is needed
    assert troubled(None, BEGIN, str(error), recover=needs_recovery(error)).recover is needed


def test_a_group_is_one_cut_of_all_that_run_and_stays_or_goes_as_one() -> None:
    keep = Keep(last=2)
    world = World([order("1h", group=True, keep=keep), order("1h", DB, group=True, keep=keep)])
    world.play(5 * HOUR)

    assert {len(one.guests) for _, one in world.log if isinstance(one, CreateGroup)} == {2}
    assert len(world.times(CreateGroup)) == 5
    assert len(world.times(CreateSnapshot)) == 0
    assert set(world.stores["near"]) == {"s-4-w", "s-4-d", "s-5-w", "s-5-d"}
    held = world.stores["near"]["s-4-w"]
    world.stores["near"]["s-4-w"] = Held(kept=replace(held.kept, pinned=True))
    world.play(5 * HOUR)
    assert {"s-4-w", "s-4-d"} < set(world.stores["near"]), "what one keeps, all keep"
    assert len(world.stores["near"]) == 6


def test_a_group_waits_for_one_that_is_out_of_sight_and_not_for_one_that_is_off() -> None:
    away, off = replace(DB, seen=False), replace(DB, state=GuestState.CRASHED)
    world = World([order("1h", group=True), order("1h", away, group=True)])
    told = agenda(world.scene)
    assert [one for one in told.work if isinstance(one, CreateSnapshot | CreateGroup)] == []
    assert [(row.due, row.why) for row in told.rows] == [
        (None, "waiting for db1: beta does not answer"), (None, "beta does not answer"),
    ]  # fmt: skip
    # Who goes by himself waits for nobody.
    world = World([order("1h"), order("1h", away)])
    assert [row.due is None for row in agenda(world.scene).rows] == [False, True]
    world = World([order("1h", group=True), order("1h", off, group=True)])
    assert [
        str(one)
        for one in agenda(world.scene).work
        if isinstance(one, CreateSnapshot | CreateGroup)
    ] == ["snapshot of web1 (auto) into near"]


def test_while_a_cut_is_taken_no_host_of_it_does_anything_else() -> None:
    world = World([order("1h", group=True), order("1h", DB, group=True)])
    [cut] = [one for one in agenda(world.scene).work if isinstance(one, CreateGroup)]
    assert cut.lanes == {"group mine/auto", "host alpha", "host beta"}
    busy = agenda(replace(world.scene, busy=frozenset({"host beta"})))
    assert [one for one in busy.work if isinstance(one, CreateSnapshot | CreateGroup)] == []
