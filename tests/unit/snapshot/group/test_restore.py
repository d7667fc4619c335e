"""A group comes back as one: who waits for whom, and what is told when one of it cannot."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.support.restored import RESTORED
from tests.support.restoring import ABOUT, ALPHA, OPENED, PLAN, Side, side
from tests.support.snapshots import PUBLIC
from tests.support.stocking import Stock, stock
from vmckpt.errors import BadInput, Cancelled, HypervisorError, RemoteError, TimedOut, VmckptError
from vmckpt.hypervisor import domains
from vmckpt.model.events import Caller
from vmckpt.snapshot.group import restore as group_restore
from vmckpt.snapshot.group import rules
from vmckpt.snapshot.request import Restored, RestoreRequest
from vmckpt.snapshot.restore import restore as restore_restore
from vmckpt.snapshot.restore.exclusivity import HostAnswer
from vmckpt.snapshot.restore.restore import Gate, Opened, _Answers
from vmckpt.store.format.metadata import new_id

__all__ = ["side", "stock"]

GROUP = new_id(b"a group of", "g")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_nobody_is_ended_before_all_can_be_and_nobody_is_back_before_all_are(
    side: Side,
) -> None:
    side.runs = True
    gate = Gate(2)
    works = [side.work(end_running=True) for _ in range(2)]
    for work in works:
        work._gate = gate
    first = asyncio.create_task(works[0].make_way(PLAN, {}, ABOUT))
    await settled()
    assert (side.ended, side.notes.steps) == ([], [])
    ending = asyncio.Event()
    once = works[1]._step_log.intend

    async def slowly(*given: Any, **more: Any) -> Any:
        await ending.wait()
        return await once(*given, **more)

    works[1]._step_log.intend = slowly  # type: ignore[method-assign]
    second = asyncio.create_task(works[1].make_way(PLAN, {}, ABOUT))
    await settled()
    assert (len(side.ended), first.done()) == (1, False)
    ending.set()
    await asyncio.gather(first, second)
    assert len(side.ended) == 2


@pytest.mark.parametrize(("ready", "ended"), [(False, 0), (True, 1)])
async def test_who_waits_in_vain_says_how_it_stands(side: Side, ready: bool, ended: int) -> None:
    side.runs = True
    gate = Gate(2)
    work = side.work(end_running=True)
    work._gate = gate
    waiting = asyncio.create_task(work.make_way(PLAN, {}, ABOUT))
    await settled()
    if ready:
        await gate.all_here("the other")
        await settled()
    gate.fail()
    with pytest.raises(TimedOut, match="is not restored" if ready else "web1 is unchanged"):
        await waiting
    assert len(side.ended) == ended


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have their image in the same place."""
    monkeypatch.setattr(restore_restore, "planned", lambda *_: PLAN)


def member(name: str) -> Opened:
    return replace(OPENED, public=replace(PUBLIC, id=name, guest=name))


def test_two_with_one_image_on_a_host_are_refused() -> None:
    request = RestoreRequest(snapshot=GROUP)
    beta = replace(ALPHA, name="beta")
    group_restore.apart([(ALPHA, member("a")), (beta, member("b"))], request)
    with pytest.raises(BadInput, match="on alpha would be an image of both a and b"):
        group_restore.apart([(ALPHA, member("a")), (ALPHA, member("b"))], request)


async def test_ready_is_waited_for_and_asked_again(side: Side) -> None:
    gate = Gate(2)
    work = side.work(end_running=True)
    work._gate = gate
    answers = _Answers(work, PLAN, {})
    ready = asyncio.create_task(answers("ready", {}))
    await settled()
    assert not ready.done()
    await gate.all_here("the other")
    assert await ready == {"answer": True}
    # Whoever has started it meanwhile is seen.
    side.runs, side.heard = True, [HostAnswer(host="beta", runs=True, users={})]
    assert "is running or paused on beta" in (await answers("make way", ABOUT))["refused"]


async def test_one_that_cannot_go_on_is_told_of_and_is_back(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resume(*_: object) -> None:
        raise HypervisorError("alpha: libvirtd is gone", host="alpha")

    monkeypatch.setattr(domains, "resume", resume)
    said = await side.work().let_go(PLAN)
    assert said is not None
    assert "web1 was restored but may still be paused" in said


class Members:
    """Restores that come to the gate as real ones do, and go wrong where they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, VmckptError]) -> None:
        self.seen: list[str] = []
        self.wrong = wrong
        self.stops: list[asyncio.Event] = []
        monkeypatch.setattr(restore_restore, "restore", self.restore)

    async def restore(
        self, _: object, __: object, request: RestoreRequest, caller: Caller,
        *, hosts: object, gate: Gate,
    ) -> Restored:  # fmt: skip
        name = request.snapshot
        self.stops.append(caller.stop)
        for step in ("ready", "ended", "back"):
            if error := self.wrong.get(f"{name} {step}"):
                raise error
            self.seen.append(f"{name} {step}")
            await gate.all_here(f"{name} is {step}")
        return replace(RESTORED, guest=name)

    async def run(self, stop: asyncio.Event | None = None) -> group_restore.GroupRestored:
        members = [(replace(ALPHA, name=f"on-{name}"), member(name)) for name in ("a", "b", "c")]
        caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=stop or asyncio.Event())
        request = RestoreRequest(snapshot=GROUP, end_running=True)
        return await group_restore.restore(GROUP, members, request, caller, hosts={})


async def test_all_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(monkeypatch, {})
    done = await members.run()
    assert [one.guest for one in done.members] == ["a", "b", "c"]
    assert [word.split()[1] for word in members.seen] == ["ready"] * 3 + ["ended"] * 3 + [
        "back"
    ] * 3
    assert set(done.as_json()) == {"group", "members"}


@pytest.mark.parametrize(
    ("step", "others"), [("ready", "is ready"), ("ended", "is ended"), ("back", "is back")]
)
async def test_one_that_fails_is_told_with_how_the_others_stand(
    monkeypatch: pytest.MonkeyPatch, step: str, others: str
) -> None:
    members = Members(monkeypatch, {f"b {step}": HypervisorError("no room", host="alpha")})
    with pytest.raises(HypervisorError) as caught:
        await members.run()
    assert caught.value.message == f"no room; a {others}; c {others}"
    assert all(one.is_set() for one in members.stops)


async def test_what_nobody_knows_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = RemoteError("the agent is gone")
    refused = HypervisorError("no room", host="alpha")
    members = Members(monkeypatch, {"a back": refused, "c back": lost})
    with pytest.raises(RemoteError, match="the agent is gone; a: no room; b is back"):
        await members.run()


async def test_the_operator_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    members, stop = Members(monkeypatch, {}), asyncio.Event()
    wait = Gate.all_here

    async def all_here(gate: Gate, meanwhile: str) -> None:
        if meanwhile == "b is ready":
            stop.set()
            await settled()
        await wait(gate, meanwhile)

    monkeypatch.setattr(Gate, "all_here", all_here)
    with pytest.raises(Cancelled, match="a is ready"):
        await members.run(stop)
    assert {one.split()[1] for one in members.seen} == {"ready"}


def in_group(stock: Stock, size: str = "2") -> None:
    for guest in ("web1", "db1"):
        stock.put(f"{guest}-1", [1], guest=guest, group=GROUP, tags={rules.SIZE: size})


@pytest.mark.parametrize("option", [("--as", "x"), ("--link",), ("--lazy",), ("--on-restore", ":")])
def test_what_is_for_one_guest_is_refused(stock: Stock, option: tuple[str, ...]) -> None:
    in_group(stock)
    code, _, err = stock("restore", GROUP, *option)
    assert code == 2
    assert f"{option[0]} is not available for a group, and {GROUP} is a group" in err


def test_an_incomplete_group_is_refused(stock: Stock) -> None:
    in_group(stock, "3")
    code, _, err = stock("restore", GROUP)
    assert (code, "is incomplete: 2 of 3" in err) == (45, True)
    code, _, err = stock("restore", new_id(b"0123456789", "g"))
    assert (code, "no store has the complete group" in err) == (45, True)
