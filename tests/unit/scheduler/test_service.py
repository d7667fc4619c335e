"""The service at work on real stores, with guests that are only names."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import GUEST
from tests.support.stocking import Stock, flip, stocked
from vmckpt.app import controller, fleet, scheduler, snapshots
from vmckpt.app.controller import Controller
from vmckpt.cli import app
from vmckpt.errors import BadInput, Cancelled, GuestLocked, HypervisorError, PolicyError
from vmckpt.inventory import Inventory
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.model.events import Caller
from vmckpt.model.guest import Guest, GuestState
from vmckpt.model.host import Host
from vmckpt.policy import loader
from vmckpt.scheduler.leases import ScheduleLeases
from vmckpt.scheduler.schedules import ScheduleSelection
from vmckpt.scheduler.service import Told
from vmckpt.snapshot.request import Taken, TakeRequest
from vmckpt.units import Bytes, Seconds

POLICY = """\
version: vmckpt/v1
name: mine
select: {guests: [web*]}
snapshots:
  - name: often
    every: 1s
    keep: {last: 2}
    copies: [{to: far, keep: {last: 100}}]
    verify: {every: 1d}
"""
DB = replace(GUEST, name="web2", uuid="11111111-be04-4dd1-80ff-c8e5fa28580b")


class World:
    """What a service sees and does."""

    def __init__(self, stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stock = stock
        self.guests: list[Guest] = [GUEST]
        self.silent: dict[str, str] = {}
        self.told: list[Told] = []
        self.asked: list[tuple[str, TakeRequest]] = []
        self.wrong: Callable[[TakeRequest], Exception | None] = lambda _: None
        self.stop = asyncio.Event()
        (stock.folder / "policies").mkdir(exist_ok=True)
        (stock.folder / "policies/mine.yaml").write_text(POLICY)

        async def guests(_: Inventory) -> tuple[Sequence[tuple[Host, Guest]], Mapping[str, str]]:
            host = self.inventory.host("alpha")
            return [(host, one) for one in self.guests], self.silent

        async def take(acting: Controller, store: str, request: TakeRequest) -> Taken:
            return await self.take(store, request, acting.caller)

        monkeypatch.setattr(fleet, "guests", guests)
        monkeypatch.setattr(snapshots, "take", take)

    @property
    def inventory(self) -> Inventory:
        return controller.load_inventory(self.stock.folder / "hosts.yaml")

    async def take(self, store: str, request: TakeRequest, caller: Caller) -> Taken:
        self.asked.append((store, request))
        error = self.wrong(request)
        if error is not None:
            raise error
        guest = next(one for one in self.guests if one.uuid == request.guest)
        number = len(self.asked)
        id_ = self.stock.put(
            f"n{number}", [number], in_=store, guest=guest.name, guest_uuid=guest.uuid,
            tags=dict(request.tags), made_at=time.time(),
        )  # fmt: skip
        return Taken(
            id=id_, name=id_, guest=guest.name, host="alpha", store=store, pause=Seconds(0.01),
            took=Seconds(0.1), read=Bytes(1), same=Bytes(0), zero=Bytes(0), written=Bytes(1),
            encrypted=False, warnings=(), job=None,
        )  # fmt: skip

    async def run(self, *, once: bool = True, limit: float = 20.0, **wanted: Any) -> int:
        policies = loader.load_all(self.stock.folder / "policies")
        running = scheduler.run(
            self.inventory, policies, ScheduleSelection(**wanted), identity=None, once=once,
            stop=self.stop, tell=self.told.append,
        )  # fmt: skip
        return await asyncio.wait_for(running, limit)

    async def verdicts(self) -> dict[str, bool | None]:
        found = await snapshots.listed(self.inventory, "near", None)
        return {one.id: one.verdict.good for one in found}

    def has(self, store: str) -> set[str]:
        return {one.id for one in self.stock.store(store).manifests()}

    def said(self, event: str) -> list[str]:
        return [one.text for one in self.told if one.event == event]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("waited in vain")


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> World:
    return World(stocked(tmp_path, monkeypatch, capsys), monkeypatch)


async def test_once_does_all_that_is_due_and_ends(world: World) -> None:
    assert await world.run() == 0

    [(store, request)] = world.asked[:1]
    assert (store, request.guest, request.tags) == ("near", GUEST.uuid, {"schedule": "often"})
    assert world.has("near") == world.has("far")
    events = [one.event for one in world.told]
    assert (events[0], events[-1]) == ("started", "stopped")
    assert {"took", "copied", "verified", "collected"} <= set(events)
    assert True in (await world.verdicts()).values()
    with Journal() as journal:
        [job] = journal.operations()
    assert (job.kind, job.outcome) == ("run", "completed")


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
    assert [line.startswith("failed: snapshot of web1 (often) into near: no (again in 30")
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

    assert len([one for one in world.said("warning") if "far does not answer" in one]) == 1
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
    assert world.said("given up") == ["given up: snapshot of web1 (often) into near"]
    assert world.has("near") == set()


async def test_two_services_do_not_take_both(world: World) -> None:
    first = ScheduleLeases("here", print)
    assert first.claim({"mine/often"}) == {"mine/often"}
    await world.run()
    assert world.asked == []
    assert "schedule mine/often is left to another service" in world.said("warning")[0]

    await first.end()
    await world.run()
    assert len(world.asked) >= 1


async def test_what_a_killed_service_held_is_taken_over(world: World) -> None:
    with Journal() as journal:
        dead = replace(controller_identity.this_process(), pid=1, started=1)
        id_ = journal.begin(NewOperation(kind="run", guest="schedules"), controller=dead)
        journal.acquire(id_, "schedule/mine/often", by=dead)
    await world.run()

    assert len(world.asked) >= 1
    with Journal() as journal:
        assert journal.operation(id_, ended=True).outcome == "failed"


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


def test_a_dry_run_says_what_is_due_and_why(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    path = world.stock.folder / "policies/mine.yaml"
    path.write_text(POLICY + "  - {name: paying, every: auto}\n")
    inventory = str(world.stock.folder / "hosts.yaml")
    assert app.run(["run", "--dry-run", "--inventory", inventory]) == 0
    shown = capsys.readouterr().out
    assert "mine/often" in shown
    assert "there is none yet" in shown
    assert "web1, paying: C = 5.0 s, as nothing is known of it yet; M = " in shown
    assert "sqrt(2CM)" in shown
    assert app.run(["run", "--dry-run", "--json", "--inventory", inventory]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["schedule"] for one in told["schedules"]] == ["often", "paying"]
    assert [one["what"] for one in told["due"]] == ["take", "collect", "collect"]
    assert world.asked == []


async def test_a_guest_that_no_host_has_is_said(world: World) -> None:
    assert await world.run(guests=("wbe1",)) == 1
    assert world.said("warning") == ["no guest 'wbe1' on hosts that answer; did you mean 'web1'?"]
    assert world.asked == []


@pytest.mark.parametrize("once", [["--once"], []])
def test_a_policy_that_there_is_not_is_refused_at_once(
    world: World, capsys: pytest.CaptureFixture[str], once: list[str]
) -> None:
    inventory = str(world.stock.folder / "hosts.yaml")
    words = ["run", "--policy", "nix", "--inventory", inventory, *once]
    assert app.run(words) == PolicyError.exit_code
    assert "no policy 'nix'" in capsys.readouterr().err


def test_without_any_schedule_it_says_so(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    (world.stock.folder / "policies/mine.yaml").unlink()
    assert app.run(["run", "--inventory", str(world.stock.folder / "hosts.yaml")]) == 2
    assert "no policy has schedules of snapshots; add snapshots: [" in capsys.readouterr().err


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
    world.wrong = lambda _: GuestLocked("guest web1 has an operation already")
    assert await world.run() == 1
    assert "has an operation already (again in" in world.said("failed")[0]


async def test_a_guest_of_a_silent_host_is_not_taken_for_gone(world: World) -> None:
    world.guests = [replace(GUEST, state=GuestState.SHUT_OFF)]
    assert await world.run() == 0
    assert world.asked == []


def test_it_is_bad_input_to_act_where_only_looking_is_allowed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_READ_ONLY", "1")
    with pytest.raises(BadInput, match="only looking"):
        asyncio.run(world.run())
