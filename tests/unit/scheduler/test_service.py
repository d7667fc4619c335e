"""The service at work on real stores, with guests that are only names."""

import asyncio
import time
from dataclasses import replace

import pytest

from tests.support.builders import GUEST
from tests.support.services import DB, POLICY, World, until, world
from tests.support.stocking import flip
from vmckpt import recovery
from vmckpt.app import snapshots
from vmckpt.app.controller import Controller
from vmckpt.errors import Cancelled, GuestLocked, HypervisorError
from vmckpt.journal import wording
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.model.guest import GuestState
from vmckpt.scheduler import agenda
from vmckpt.scheduler.leases import ScheduleLeases
from vmckpt.snapshot.request import Taken, TakeRequest


async def test_it_goes_on_until_it_is_stopped_and_prunes_what_it_copied(world: World) -> None:
    running = asyncio.create_task(world.run(once=False))
    await until(lambda: len(world.asked) >= 4 and bool(world.said("pruned")))
    world.stop.set()
    assert await running == 0

    assert len(world.has("near")) <= 4
    assert len(world.has("far")) >= 3
    assert world.has("far") & world.has("near")


async def test_a_guest_that_fails_stops_no_other(world: World) -> None:
    world.guests.append(DB)
    no = HypervisorError("no", host="alpha")
    world.wrong = lambda request: no if request.guest == GUEST.uuid else None

    assert await world.run() == 1
    assert [line.startswith("failed: snapshot of web1 (often) into near: no (retrying in 30")
            for line in world.said("failed")] == [True]  # fmt: skip
    assert len(world.has("near")) >= 1
    assert len([one for _, one in world.asked if one.guest == GUEST.uuid]) == 1


async def test_a_store_that_is_away_is_said_once_and_near_is_used(world: World) -> None:
    (world.stock.folder / "far").rename(world.stock.folder / "elsewhere")
    running = asyncio.create_task(world.run(once=False))
    await until(lambda: len(world.asked) >= 3)
    (world.stock.folder / "elsewhere").rename(world.stock.folder / "far")
    await until(lambda: bool(world.has("far")))
    world.stop.set()
    await running

    assert len([one for one in world.said("warning") if "far cannot be read" in one]) == 1
    assert world.said("mended") == ["store far answers again"]


async def test_stopping_gives_up_what_is_being_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def slow(acting: Controller, _: str, __: TakeRequest) -> Taken:
        begun.set()
        await acting.caller.stop.wait()
        raise Cancelled("stopped")

    monkeypatch.setattr(snapshots, "take", slow)
    running = asyncio.create_task(world.run(once=False))
    await begun.wait()
    world.stop.set()

    assert await running == 0
    assert world.said("given up") == ["cancelled: snapshot of web1 (often) into near"]
    assert world.has("near") == set()


async def test_two_services_do_not_take_both(world: World) -> None:
    first = ScheduleLeases("here", print)
    assert first.claim({"mine/often"}) == {"mine/often"}
    await world.run()
    assert world.asked == []
    assert "this service is not responsible for schedule mine/often: " in world.said("warning")[0]

    await first.end()
    await world.run()
    assert len(world.asked) >= 1


async def test_cancel_from_another_terminal_ends_it(world: World) -> None:
    running = asyncio.create_task(world.run(once=False))
    await until(lambda: bool(world.said("took")))
    with Journal() as journal:
        [job] = journal.operations(active=True)
        journal.ask(job.id, "cancel", {}, "me")

    assert await running == 0


async def test_damage_is_said_written_down_and_takes_no_place_from_a_good_one(
    world: World,
) -> None:
    text = POLICY.replace("    copies:", "    # copies:").replace("every: 1s", "every: 2h")
    (world.stock.folder / "policies/mine.yaml").write_text(text.replace("last: 2", "last: 1"))
    old = world.stock.put("old", [1], tags={"schedule": "often"}, made_at=time.time() - 9000)
    before = set(world.stock.packs())
    new = world.stock.put("new", [7], disk=7, tags={"schedule": "often"}, made_at=time.time() - 10)
    [pack] = set(world.stock.packs()) - before
    flip(pack, 60)

    assert await world.run() == 1, "damage is something that went wrong"
    [damage] = world.said("damaged")
    assert damage.startswith("verified 2 snapshots in near (sealed): packs/")
    assert new in damage
    # The damaged one is no snapshot that schedules count by, nor one that retention keeps.
    assert len(world.asked) == 1
    verdicts = await world.verdicts()
    assert (verdicts.pop(old), list(verdicts.values())) == (True, [None])
    assert new not in verdicts


async def test_a_guest_that_no_host_has_is_said(world: World) -> None:
    assert await world.run(guests=("wbe1",)) == 1
    [warning] = world.said("warning")
    assert warning == "guest 'wbe1' was not found on any host that answered; did you mean 'web1'?"
    assert world.asked == []


async def test_a_schedule_with_an_unknown_store_is_said_and_left_out(world: World) -> None:
    text = POLICY.replace("to: far", "to: fra")
    (world.stock.folder / "policies/mine.yaml").write_text(text)
    assert await world.run() == 1
    assert "no store 'fra' in the inventory; did you mean 'far'?" in world.said("warning")[0]
    assert world.asked == []


async def test_a_busy_guest_is_tried_again(world: World) -> None:
    with Journal() as journal:
        other = journal.begin(NewOperation(kind="migrate", guest="web1"))
        journal.acquire(other, guest_resource(GUEST.uuid))
    world.wrong = lambda _: GuestLocked("guest web1 is locked by job m-1")
    assert await world.run() == 1
    assert "is locked by job m-1 (retrying in" in world.said("failed")[0]


@pytest.mark.parametrize(("interrupted", "recoveries"), [(True, 2), (False, 1)])
async def test_a_recovery_follows_the_lock_of_an_interrupted_job_but_not_of_a_live_job(
    world: World, monkeypatch: pytest.MonkeyPatch, interrupted: bool, recoveries: int
) -> None:
    """The first recovery is at the start of the service."""
    recovered: list[bool] = []

    async def recover(*_: object) -> bool:
        recovered.append(True)
        return True

    monkeypatch.setattr(recovery, "recover_before", recover)
    locked = GuestLocked("web1 is locked", hint="if its controller has died, run vmckpt recover")
    locked.interrupted = interrupted
    world.wrong = lambda _: locked
    assert await world.run() == 1
    assert len(recovered) == recoveries


async def test_a_guest_of_a_silent_host_is_not_taken_for_gone(world: World) -> None:
    world.guests = [replace(GUEST, state=GuestState.SHUT_OFF)]
    assert await world.run() == 0
    assert world.asked == []


__all__ = ["world"]


async def test_many_hosts_that_stop_to_answer_are_one_line(world: World) -> None:
    running = asyncio.create_task(world.run(once=False))
    await until(lambda: bool(world.asked))
    world.silent = {f"h{number:03}": "no route" for number in range(200)}
    await until(lambda: bool(world.said("warning")))
    world.stop.set()
    await running

    assert world.said("warning") == [
        "200 hosts do not answer: h000, h001, h002 and 197 more; h000: no route"
    ]


async def test_failures_of_work_and_their_end_are_in_the_journal(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any service that sends alerts reads them there."""
    monkeypatch.setattr(agenda, "_FIRST", 0.01)
    left = [HypervisorError("no", host="alpha")] * 2
    world.wrong = lambda _: left.pop() if left else None
    running = asyncio.create_task(world.run(once=False))
    await until(lambda: len(world.said("took")) >= 2)
    world.stop.set()
    await running

    with Journal() as journal:
        (job,) = [one for one in journal.ended(0.0) if one.kind == "run"]
        events = journal.events(job.id)
    key = f"take {GUEST.uuid} often"
    first, second, done = events
    assert [(one.kind, one.values["key"]) for one in events] == [
        ("work-failed", key), ("work-failed", key), ("work-done", key),
    ]  # fmt: skip
    assert first.values == {
        "key": key, "work": "snapshot of web1 (often) into near", "guest": "web1", "why": "no",
        "times": 1,
    }  # fmt: skip
    assert second.values["times"] == 2
    told = [wording.event(one.kind, one.values) for one in (second, done)]
    assert told == [
        "snapshot of web1 (often) into near failed 2 times: no",
        "snapshot of web1 (often) into near succeeded",
    ]
