"""What a run does to hosts, one guest at a time."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.builders import HOST
from tests.support.sights import answers, at, by, seen, vm
from vmckpt.app import rolling_maintenance
from vmckpt.app.controller import Controller
from vmckpt.errors import Cancelled, HypervisorError, RemoteError, VmckptError
from vmckpt.evacuation import service
from vmckpt.evacuation.host_actions import Orders, Site
from vmckpt.evacuation.interfaces import MoveEnd, Turn
from vmckpt.evacuation.plan import planner
from vmckpt.evacuation.plan.inventory import FleetView, Known, TravelMethod
from vmckpt.evacuation.plan.plan import Checked
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task, terms
from vmckpt.hypervisor import lifecycle
from vmckpt.journal import location as locations
from vmckpt.journal import recorder
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.migration import service as moves
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import MigrateRequest
from vmckpt.model.events import Caller
from vmckpt.model.guest import GuestState
from vmckpt.model.migration import FailureSide, Outcome
from vmckpt.protection import active, agent_client
from vmckpt.protection import stop as protection_stop
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.units import Seconds


class Journal:
    """Keeps what came of steps."""

    id = "e-1"

    def __init__(self) -> None:
        self.states: list[StepState] = []

    def check(self) -> None:
        """It is still ours."""

    def intend(self, *_: object) -> int:
        return 1

    def conclude(self, _: int, state: StepState) -> None:
        self.states.append(state)


def site(
    journal: Any,
    stop: asyncio.Event,
    checks: Any = (),
    warn: Callable[[str], None] = lambda _: None,
) -> Site:
    scope: Any = SimpleNamespace(
        inventory=SimpleNamespace(host=lambda name: replace(HOST, name=name)), once=lambda: ()
    )
    caller = Caller(emit=lambda _: None, warn=warn, stop=stop)
    orders: Any = SimpleNamespace(scope=scope, caller=caller, abort=asyncio.Event())

    hosts: Any = SimpleNamespace(logins=lambda *_: nullcontext())
    return Site(orders, hosts, journal, dict(checks))


def known(way: TravelMethod) -> Known:
    return Known(name="a", guest=vm("a"), host="alpha", policy=by(), way=way)


def its_turn() -> Turn:
    turn = Turn()
    turn.come()
    return turn


@pytest.mark.parametrize(
    ("mode", "wished"), [("offline", None), ("switch", None), ("auto", "auto")]
)
async def test_a_guest_that_was_off_when_it_was_looked_at_is_moved_as_it_is_now(
    monkeypatch: pytest.MonkeyPatch, mode: str, wished: str | None
) -> None:
    asked: list[MigrateRequest] = []

    async def migrate(_: object, request: MigrateRequest, *__: object) -> None:
        asked.append(request)
        raise HypervisorError("beta: no", host="beta")

    monkeypatch.setattr(moves, "migrate", migrate)
    its = site(Journal(), asyncio.Event(), {("a", "beta"): Checked(policy="p", mode=mode)}.items())
    moved = await its.move(known(TravelMethod.LIVE), "beta", its_turn())
    assert moved.why == "beta: no"
    assert asked[0].overrides.mode == wished


async def test_what_stays_on_the_old_host_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who emptied it learns of it from repopulate, which it bars."""
    told: list[str] = []

    async def migrate(*_: object) -> MigrationReport:
        return MigrationReport(
            guest="a", source="alpha", target="beta", outcome=Outcome.COMPLETED, driver=None,
            began=Seconds(0.0), elapsed=Seconds(1.0), totals=None, observed_downtime=None,
            stays=("/a is still on alpha: guest b has it",),
        )  # fmt: skip

    monkeypatch.setattr(moves, "migrate", migrate)
    its = site(Journal(), asyncio.Event(), warn=told.append)
    assert (await its.move(known(TravelMethod.LIVE), "beta", its_turn())).good
    assert told == ["a: /a is still on alpha: guest b has it"]


@pytest.mark.parametrize(
    ("error", "blame"),
    [
        (HypervisorError("it says no", host="alpha"), FailureSide.GUEST),
        (HypervisorError("it says no", host="beta"), FailureSide.TARGET),
        # Two such, and a target is left out for a while: not for what its peer cannot do.
        (RemoteError("no space left on device", host="alpha"), FailureSide.GUEST),
        (RemoteError("no space left on device", host="beta"), FailureSide.TARGET),
        (RemoteError("no space left on device", host="alphabet"), FailureSide.TARGET),
        # The message does not decide.
        (RemoteError("alpha: no space left on device", host="beta"), FailureSide.TARGET),
        (VmckptError("alpha: no space left on device"), FailureSide.TARGET),
    ],
)
async def test_a_target_is_to_blame_for_what_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch, error: VmckptError, blame: FailureSide
) -> None:
    async def migrate(*_: object) -> None:
        raise error

    monkeypatch.setattr(moves, "migrate", migrate)
    moved = await site(Journal(), asyncio.Event()).move(
        known(TravelMethod.LIVE), "beta", its_turn()
    )
    assert (moved.good, moved.blame) == (False, blame)


async def test_a_switch_that_has_begun_arrives_though_the_run_is_told_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, looks, finished = asyncio.Event(), 0, []

    async def status(host: Any, _: str) -> ProtectionStatus:
        nonlocal looks
        if host.name == "alpha":
            return parse_answer({"phase": "protecting"})
        looks += 1
        done = {"outcome": "failed-over", "why": "planned"}
        return parse_answer(done if looks >= 4 else {"phase": "waiting", "says": "switching"})

    async def ask(*_: object, **__: object) -> ProtectionStatus:
        stop.set()
        return parse_answer({})

    @contextmanager
    def attended(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(finish=lambda *told: finished.append(told))

    async def tidy(*_: object, **__: object) -> None:
        """Nothing is left."""

    monkeypatch.setattr(agent_client, "status", status)
    monkeypatch.setattr(agent_client, "request", ask)
    monkeypatch.setattr(protection_stop, "attended", attended)
    monkeypatch.setattr(protection_stop, "tidy", tidy)
    both = SimpleNamespace(
        primary=replace(HOST, name="alpha"), backup=replace(HOST, name="beta"), uuid="u-a",
        operation=SimpleNamespace(guest="a", id="p-1"), watched=False, lease=None,
    )  # fmt: skip
    monkeypatch.setattr(active, "of", lambda *_: both)
    journal = Journal()
    moved = await site(journal, stop).move(known(TravelMethod.SWITCH), "beta", its_turn())
    assert moved.good
    assert finished
    assert journal.states == [StepState.DONE]


@pytest.mark.parametrize("kind", [Kind.EVACUATE, Kind.REPOPULATE])
async def test_who_is_not_stopped_or_not_started_is_left_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind
) -> None:
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "journal.db"))
    policy = by("strategy: shutdown-and-return")
    there = [vm("a") if kind is Kind.EVACUATE else vm("a", state=GuestState.SHUT_OFF)]

    async def look(*_: object) -> FleetView:
        return seen(answers(at("alpha", *there), at("beta")), policy)

    async def refuses(*_: object) -> None:
        raise HypervisorError("alpha: it does not", host="alpha")

    monkeypatch.setattr(planner, "gather_fleet", look)
    monkeypatch.setattr(lifecycle, "shut_down", refuses)
    monkeypatch.setattr(lifecycle, "start", refuses)
    scope: Any = SimpleNamespace(
        inventory=SimpleNamespace(host=lambda name: replace(HOST, name=name)),
        terms=lambda task: terms(policy.evacuation, task.kind), run=lambda _: policy,
    )  # fmt: skip
    back = frozenset({"u-a"} if kind is Kind.REPOPULATE else ())
    task = Task(kind=kind, host="alpha", start=back, called=frozenset({("u-a", "a")}))
    caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())
    resolve: Any = None
    orders = Orders(scope=scope, task=task, caller=caller, abort=asyncio.Event(), resolve=resolve)
    new = NewOperation(kind=str(kind), guest="alpha", source="alpha", detail={})
    hosts: Any = None
    with recorder.begin(new, lambda _: None) as kept:
        told = await service.carry_out(orders, hosts, None, kept)
    assert (told.shut_down, told.started) == ((), ())
    assert [one.tenant.name for one in told.ended.left] == ["a"]
    assert told.outcome is Outcome.FAILED


async def test_the_command_on_a_host_is_not_run_after_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop, ran = asyncio.Event(), []

    class Stopped:
        def __init__(self, *told: Any) -> None:
            self._task = told[1]

        async def __aenter__(self) -> "Stopped":
            return self

        async def __aexit__(self, *_: object) -> None:
            """Nothing is open."""

        async def plan(self) -> Any:
            return SimpleNamespace(left=())

        async def carry_out(self, *_: object) -> Report:
            stop.set()  # while the last guest arrives
            ended = MoveEnd(arrived=(), shut_down=(), left=(), stopped=True, took=Seconds(1.0))
            return Report(task=self._task, job="e-1", ended=ended)

    async def runs(*told: object, **__: object) -> None:
        ran.append(told)

    monkeypatch.setattr(rolling_maintenance, "Emptying", Stopped)
    monkeypatch.setattr(rolling_maintenance, "_run", runs)
    host: Any = replace(HOST, name="alpha", ssh=object())  # type: ignore[arg-type]
    known_: Any = SimpleNamespace(
        may_act=lambda: None, host=lambda _: host, roles=None, read_only=True
    )
    options = rolling_maintenance.RollingOptions(
        command="systemctl reboot", before=None, after=None, policy=None, limit=Seconds(5.0),
        healthy_in=Seconds(5.0), why="",
    )  # fmt: skip
    caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=stop)
    with pytest.raises(Cancelled, match="the command was not run"):
        await rolling_maintenance.roll(
            Controller(inventory=known_, caller=caller),
            ["alpha"],
            options,
            show=lambda _: None,
            abort=asyncio.Event(),
        )
    assert not ran
