"""A service that keeps watch: whom it looks at, what it does, and what it does only once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.host_deaths import CASE, HEARS, READY, WELL
from vmckpt.errors import FencingFailed, GuestLocked, JournalError
from vmckpt.inventory import Inventory
from vmckpt.journal.records import Operation
from vmckpt.model.events import Caller
from vmckpt.model.host import Host
from vmckpt.policy.model import Failover, Protection
from vmckpt.protection import active, solo_permission, stop
from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.host_death import Case
from vmckpt.protection.stop import Known, StopResult
from vmckpt.scheduler import failure_detector
from vmckpt.scheduler.failure_detector import FailureDetector
from vmckpt.scheduler.service import Told
from vmckpt.units import Seconds

HOSTS = {name: Host(name=name, uri=f"qemu+tcp://{name}/system") for name in ("alpha", "beta")}
TERMS = Protection(failover=Failover.AUTOMATIC).as_json()
RUNS = replace(CASE, ours=parse_answer(WELL), theirs=parse_answer(HEARS), watched=True)
DEAD = replace(CASE, theirs=parse_answer(READY), watched=True)
WANTS = replace(
    RUNS, ours=parse_answer({**WELL, "wants_leave": "17", "says": "output waits: no answer"})
)


def operation(guest: str, **changes: Any) -> Operation:
    told = {
        "id": f"job-{guest}", "guest": guest, "guest_uuid": f"u-{guest}", "phase": "protecting",
        "source": "alpha", "target": "beta", "detail": {"judge": "watch", "terms": TERMS},
    }  # fmt: skip
    return cast("Operation", SimpleNamespace(**{**told, **changes}))


@dataclass
class World:
    """Guests, and how they stand when they are looked at."""

    guests: dict[str, Case] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    lease: str | None = None
    ours: bool = True
    broken: str | None = None
    fails: Exception | None = None
    slow: asyncio.Event = field(default_factory=asyncio.Event)
    looked: list[str] = field(default_factory=list)
    did: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    told: list[Told] = field(default_factory=list)

    def add(self, guest: str, case: Case, **changes: Any) -> None:
        self.guests[guest] = case
        self.operations.append(operation(guest, **changes))

    def unattended(self) -> list[Operation]:
        if self.broken is not None:
            raise JournalError(self.broken)
        return self.operations

    def known(self, _: object, one: Operation) -> Known:
        return Known(
            operation=one, primary=HOSTS["alpha"], backup=HOSTS["beta"], lease=self.lease,
            session="5e55",
        )  # fmt: skip

    async def seen(self, known: Known) -> Case:
        self.looked.append(known.operation.guest)
        return self.guests[known.operation.guest]

    async def failover(self, known: Known, _: Caller, *, case: Case) -> StopResult:
        guest = known.operation.guest
        self.did.append(f"failover {guest}")
        if self.fails is not None:
            raise self.fails
        assert case is self.guests[guest]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.slow.wait()
        self.at_once -= 1
        self.operations = [one for one in self.operations if one.guest != guest]
        self.did.append(f"{guest} runs")
        return StopResult(guest=guest, runs_on="beta", why="alpha is off", took=Seconds(1.0))

    @contextmanager
    def attended(self, known: Known, _: Caller) -> Iterator[None]:
        self.did.append(f"attended {known.operation.guest}")
        yield

    async def note(self, _: object, job: str, why: str) -> None:
        self.did.append(f"noted {job}: {why}")

    async def grant(self, host: Host, guest: str, name: str) -> None:
        self.did.append(f"gave {name} to {guest} on {host.name}")
        self.guests = dict.fromkeys(self.guests, RUNS)

    async def close(self, _: object, job: str) -> None:
        self.did.append(f"stands {job}")
        self.guests = dict.fromkeys(self.guests, RUNS)

    async def is_ours(self) -> bool:
        return self.ours

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.told]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    made.slow.set()
    monkeypatch.setattr(active, "unattended", made.unattended)
    monkeypatch.setattr(active, "known", made.known)
    for room, names in ((stop, ("seen", "failover", "attended")),
                        (solo_permission, ("note", "grant", "close"))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(room, name, getattr(made, name))
    monkeypatch.setattr(failure_detector, "_LOOK", Seconds(0.01))
    monkeypatch.setattr(failure_detector, "_EACH", Seconds(0.0))
    return made


@asynccontextmanager
async def kept(world: World) -> AsyncIterator[None]:
    inventory = cast("Inventory", SimpleNamespace(hosts=HOSTS))
    task = asyncio.create_task(FailureDetector(inventory, world.is_ours, world.told.append).keep())
    try:
        yield
    finally:
        task.cancel()
        asyncio.get_running_loop().call_later(0.1, world.slow.set)
        await asyncio.gather(task, return_exceptions=True)


async def comes_true(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come true")


async def looks(world: World, count: int) -> None:
    """So many more."""
    wanted = len(world.looked) + count
    await comes_true(lambda: len(world.looked) >= wanted)


async def until(world: World, text: str) -> None:
    await comes_true(lambda: any(text in line for line in (*world.did, *world.texts)))


async def test_a_guest_that_is_well_is_looked_at_again_and_nothing_is_said(one: World) -> None:
    one.add("web1", RUNS)
    async with kept(one):
        await looks(one, 3)
    assert (one.did, one.told) == ([], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"detail": {"judge": "lease", "terms": TERMS}},
        {"detail": {"judge": "person", "terms": TERMS}},
        {"target": "gamma"},  # not in the inventory
    ],
)
async def test_only_guests_that_somebody_must_watch_are_looked_at(
    one: World, changes: dict[str, Any]
) -> None:
    one.add("web1", RUNS)
    one.add("web2", DEAD, **changes)
    async with kept(one):
        await looks(one, 3)
    assert set(one.looked) == {"web1"}
    missing = [text for text in one.texts if "no failure detection for web2" in text]
    assert len(missing) == ("target" in changes)


async def test_without_the_claim_another_service_keeps_watch(one: World) -> None:
    one.add("web1", DEAD)
    one.ours = False
    async with kept(one):
        await asyncio.sleep(0.05)
    assert one.looked == []


async def test_a_host_that_answers_again_before_its_turn_is_left_alone(one: World) -> None:
    """Its other guest's failover has taken a while."""
    one.add("web1", DEAD)
    one.add("web2", DEAD)
    one.slow.clear()
    async with kept(one):
        await until(one, "failover")
        await comes_true(lambda: len(one.looked) == 2)
        await asyncio.sleep(0.02)  # the other one waits for its turn
        first = one.did[0].removeprefix("failover ")
        (second,) = {"web1", "web2"} - {first}
        one.guests[second] = RUNS
        one.slow.set()
        await until(one, f"{first} runs")
        await looks(one, 3)
    assert one.did == [f"failover {first}", f"{first} runs"]


async def test_a_dead_host_s_guests_are_failed_over_one_after_the_other(one: World) -> None:
    one.add("web1", DEAD)
    one.add("web2", DEAD)
    async with kept(one):
        await until(one, "web1 runs")
        await until(one, "web2 runs")
    assert one.most_at_once == 1
    assert sorted(one.did) == ["failover web1", "failover web2", "web1 runs", "web2 runs"]
    assert any("web1: alpha does not answer, and" in text for text in one.texts)
    failed_over = [told for told in one.told if told.event == "failed over"]
    assert [told.values["runs_on"] for told in failed_over] == ["beta", "beta"]


async def test_a_fence_agent_that_says_no_is_not_asked_all_the_time(one: World) -> None:
    one.add("web1", DEAD)
    one.fails = FencingFailed("alpha is not known to be off", hint="run this again")
    async with kept(one):
        await until(one, "alpha is not known to be off")
        await asyncio.sleep(0.1)
    assert one.did == ["failover web1"]
    assert "retrying in 30 s" in one.texts[-1]


async def test_who_is_busy_is_tried_again_at_the_next_look(one: World) -> None:
    one.add("web1", DEAD)
    one.fails = GuestLocked("web1 is attended by somebody else")
    async with kept(one):
        await looks(one, 3)
        one.fails = None
        await until(one, "web1 runs")
    assert one.did.count("failover web1") >= 3


async def test_leave_is_noted_before_it_is_given(one: World) -> None:
    one.add("web1", WANTS)
    async with kept(one):
        await until(one, "gave")
        await looks(one, 2)
    assert one.did == [
        "attended web1",
        "noted job-web1: it continues without beta: no answer",
        "gave 17 to u-web1 on alpha",
    ]
    assert one.texts == ["web1: it continues without beta: no answer"]


async def test_a_standby_that_is_whole_again_may_run_again(one: World) -> None:
    one.add("web1", replace(RUNS, alone=True))
    async with kept(one):
        await until(one, "stands job-web1")
    assert one.did == ["attended web1", "stands job-web1"]


async def test_what_was_begun_is_seen_through_when_the_service_ends(one: World) -> None:
    one.add("web1", DEAD)
    one.slow.clear()
    async with kept(one):
        await until(one, "failover web1")
    assert one.did == ["failover web1", "web1 runs"]


async def test_a_journal_that_does_not_answer_is_told_once(one: World) -> None:
    one.add("web1", RUNS)
    one.broken = "the disk is full"
    async with kept(one):
        await asyncio.sleep(0.1)
        assert one.texts == ["no failure detection for protected guests: the disk is full"]
        one.broken = None
        await looks(one, 1)
