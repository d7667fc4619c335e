"""What the services of `vmckpt.app` answer to the Python API in tests, and what they were asked."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import FACTS, GUEST, HOST, host_facts
from tests.support.fleets import guest as tenant
from tests.support.rooms import goes
from tests.support.snapshots import PUBLIC
from tests.support.worlds import facts, guest, policy
from tests.tui.still import entry
from vmckpt.app import (
    evacuation,
    fleet,
    migration,
    protection,
    snapshot_restore,
    snapshot_store,
    snapshots,
)
from vmckpt.app.fleet import HostView, Listing
from vmckpt.app.snapshot_store import SnapshotRow
from vmckpt.evacuation.interfaces import Arrived, MoveEnd
from vmckpt.evacuation.plan.forecast import PlanForecast
from vmckpt.evacuation.plan.placement import Unplaced
from vmckpt.evacuation.plan.plan import Checked
from vmckpt.evacuation.plan.plan import Plan as EvacuationPlan
from vmckpt.evacuation.report import Report
from vmckpt.evacuation.task import Kind, Task
from vmckpt.migration.forecast.forecast import Range, forecast
from vmckpt.migration.forecast.service import GuestForecast
from vmckpt.migration.plan.planner import Plan
from vmckpt.migration.report import MigrationReport
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Driver, JobTotals, Mode, Outcome
from vmckpt.policy.select import Chosen
from vmckpt.protection.request import Protected
from vmckpt.protection.stop import StopResult
from vmckpt.snapshot.request import Restored, Taken
from vmckpt.units import MIB, Bytes, Seconds

LATE = Finding(code="clock", severity=Severity.WARNING, where="beta", text="3 s late", hint=None)
REPORT = MigrationReport(
    guest="web1", source="alpha", target="beta", outcome=Outcome.COMPLETED,
    driver=Driver.PEER_TO_PEER, began=Seconds(0.0), elapsed=Seconds(4.0),
    totals=JobTotals(total=Seconds(3.0), setup=None, downtime=Seconds(0.083), iterations=2,
                     transferred=Bytes(MIB)),
    observed_downtime=None, mode=Mode.PRECOPY, policy="balanced", findings=(LATE,),
    warnings=("3 s late", "3 s late"), job="m-7k3f",
)  # fmt: skip
ORDER = Task(kind=Kind.EVACUATE, host="alpha")
TAKEN = Taken(
    id="s-n2jxhlfmmrfavwmo", name="before-upgrade", guest="web1", host="alpha", store="near",
    pause=Seconds(0.2), took=Seconds(9.0), read=Bytes(7), same=Bytes(1), zero=Bytes(1),
    written=Bytes(5), encrypted=True, warnings=("no guest agent",), job="s-1",
)  # fmt: skip
RESTORED = Restored(
    snapshot=TAKEN.id, guest="web1", host="alpha", disks=Seconds(1.0), memory=Seconds(2.0),
    took=Seconds(3.0), images={}, warnings=(), job="r-1",
)  # fmt: skip
PROTECTED = Protected(
    guest="db1", primary="alpha", backup="beta", session="x", job="p-9abc", automatic=False,
    findings=(LATE,), took=Seconds(5.0), status={}, rooms=(),
)  # fmt: skip
ENDED = StopResult(guest="db1", runs_on="beta", why="planned", took=Seconds(0.4))


def plan() -> Plan:
    known = facts(512, 200, region=128, rate=3, bandwidth=100)
    seen = tuple(
        forecast(known, policy(limit=None), mode, guest(512))
        for mode in (Mode.PRECOPY, Mode.POSTCOPY)
    )
    return Plan(
        facts=FACTS, findings=(LATE,), mode=Mode.PRECOPY, reason="it is short", policy=policy(),
        chosen=Chosen(policy=policy(), why=("it is the default",), passed_over=()),
        outlook=GuestForecast(facts=known, forecasts=seen),
    )  # fmt: skip


def evacuation_plan(*left: Unplaced) -> EvacuationPlan:
    check = Checked(
        policy="maintenance", mode="precopy", total=Range(3.0, 8.0), downtime=Range(0.1, 0.2)
    )
    return EvacuationPlan(
        task=ORDER, going=(goes("web1", "beta"),), left=left, shut_down=(), suspended=(),
        silent={}, checks={("web1", "beta"): check}, total=Range(4.0, 9.0),
        course=PlanForecast(steps=(), loads=(), stuck=(), total=Seconds(5.0)),
    )  # fmt: skip


def stays(name: str = "db1") -> Unplaced:
    return Unplaced(tenant=tenant(name, "alpha"), why="it uses a GPU", hint="detach it")


def evacuated(*left: Unplaced) -> Report:
    moved = Arrived(
        guest="web1", uuid="u-1", source="alpha", target="beta", job="m-1", took=Seconds(4.0),
        downtime=Seconds(0.1),
    )  # fmt: skip
    end = MoveEnd(arrived=(moved,), shut_down=(), left=left, stopped=False, took=Seconds(5.0))
    return Report(task=ORDER, job="e-1", ended=end)


class Answers:
    """Replaces the services. A test may change an answer, or replace it by an error."""

    def __init__(self) -> None:
        beta = HostView(host=HOST, facts=None, error="no route to host")
        row: dict[str, Any] = {"pinned": False, "trusted": True}
        self.answers: dict[str, Any] = {
            "hosts": ([HostView(host=HOST, facts=host_facts("u"), error=None), beta], ()),
            "listing": Listing(found=[(HOST, GUEST)], errors={}),
            "copies": (),
            "plan": (plan(), HOST, HOST),
            "migrate": REPORT,
            "evacuation plan": evacuation_plan(),
            "carry_out": evacuated(),
            "put_in_order": None,
            "take": TAKEN,
            "restore": RESTORED,
            "listed": [
                SnapshotRow(id=PUBLIC.id, public=PUBLIC, wrong=None, **row),
                SnapshotRow(id="s-2", public=None, wrong="it is damaged", **row),
            ],
            "protect": PROTECTED,
            "unprotect": ENDED,
            "failover": ENDED,
            "status": [entry()],
        }
        self.asked: list[tuple[str, tuple[Any, ...], Mapping[str, Any]]] = []

    def of(self, name: str) -> Callable[..., Any]:
        async def answer(*given: Any, **more: Any) -> Any:
            self.asked.append((name, given, more))
            found = self.answers[name]
            if isinstance(found, Exception):
                raise found
            return await found(*given) if callable(found) else found

        return answer

    def last(self, name: str) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What a service was asked last."""
        return next((given, more) for one, given, more in reversed(self.asked) if one == name)

    def install(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        (folder / "hosts.yaml").write_text(
            "hosts:\n  alpha: {uri: 'test:///default'}\n  beta: {uri: 'test:///default'}\n"
        )
        monkeypatch.setenv("VMCKPT_STATE", str(folder / "state"))
        monkeypatch.chdir(folder)
        for module, names in (
            (fleet, ("hosts", "listing", "copies")), (migration, ("plan", "migrate")),
            (evacuation, ("put_in_order",)), (snapshots, ("take",)),
            (snapshot_restore, ("restore",)), (snapshot_store, ("listed",)),
            (protection, ("protect", "unprotect", "failover", "status")),
        ):  # fmt: skip
            for name in names:
                monkeypatch.setattr(module, name, self.of(name))
        planned, carried_out = self.of("evacuation plan"), self.of("carry_out")
        monkeypatch.setattr(evacuation.Emptying, "plan", lambda _: planned())
        monkeypatch.setattr(evacuation.Emptying, "carry_out", lambda _, *given: carried_out(*given))
        monkeypatch.setattr(evacuation.Emptying, "__aenter__", _itself)
        monkeypatch.setattr(evacuation.Emptying, "__aexit__", _nothing)


async def _itself(one: Any, *_: object) -> Any:
    return one


async def _nothing(*_: object) -> None:
    pass
