"""vmckpt plan and policy replay: what would happen, and what would have happened."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.builders import FACTS, HOST
from tests.support.paths import ROOT
from tests.support.worlds import facts, guest, policy
from vmckpt.app import migration
from vmckpt.cli import app
from vmckpt.migration.forecast.forecast import forecast
from vmckpt.migration.forecast.service import GuestForecast
from vmckpt.migration.plan.planner import Plan
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Mode
from vmckpt.policy.select import Chosen

TRACE = ROOT / "tests/scenarios/traces/a-tenth-of-the-bandwidth.jsonl"
LATE = Finding(code="clock", severity=Severity.WARNING, where="beta", text="3 s late", hint=None)
Planned = Callable[[Plan], None]


def made() -> Plan:
    """A plan for a guest that writes more than the network carries."""
    known = facts(512, 200, region=128, rate=30, bandwidth=22.8)
    seen = tuple(
        forecast(known, policy(limit=None), mode, guest(512))
        for mode in (Mode.PRECOPY, Mode.POSTCOPY)
    )
    chosen = Chosen(policy=policy(), why=("it is the default",), passed_over=())
    return Plan(
        facts=FACTS, findings=(LATE,), chosen=chosen, policy=policy(),
        mode=Mode.POSTCOPY, reason="it ends for sure", post_copy=True,
        outlook=GuestForecast(facts=known, forecasts=seen),
    )  # fmt: skip


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """What the facade is to find."""
    (tmp_path / "hosts.yaml").write_text("hosts: {alpha: {uri: 'test:///default'}}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))

    def find(plan: Plan) -> None:
        async def found(*_: object) -> object:
            return plan, HOST, replace(HOST, name="beta")

        monkeypatch.setattr(migration, "plan", found)

    return find


def test_each_mode_is_shown_with_what_comes_of_it(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(made())
    assert app.run(["plan", "web1", "--to", "beta"]) == 0
    told = capsys.readouterr().out
    assert "3 s late" in told
    assert "web1: alpha → beta" in told
    assert "because it is the default" in told
    assert "mode postcopy: it ends for sure" in told
    (precopy,) = [line for line in told.splitlines() if line.startswith("precopy")]
    assert "never ends" in precopy
    assert "does not complete" in precopy
    (postcopy,) = [line for line in told.splitlines() if line.startswith("postcopy")]
    assert "never ends" not in postcopy
    assert "the guest: " in told


def test_what_cannot_be_is_an_error_and_tells_the_rest(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = replace(LATE, severity=Severity.BLOCKER, text="no room", hint="free some")
    planned(replace(made(), findings=(blocker,)))
    assert app.run(["plan", "web1", "--to", "beta", "--json"]) == 21
    seen = capsys.readouterr()
    told = json.loads(seen.out)
    assert (told["possible"], told["mode"], told["target"]) == (False, "postcopy", "beta")
    assert [one["text"] for one in told["findings"]] == ["no room"]
    assert [one["total_ms"] for one in told["forecasts"] if one["mode"] == "precopy"] == [None]
    assert "web1 cannot move to beta; see the findings above; nothing was changed" in seen.err


def test_a_guest_that_no_host_knows_has_findings_alone(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(Plan(facts=replace(FACTS, guest=None), findings=(LATE,)))
    assert app.run(["plan", "web1", "--to", "beta"]) == 21
    told = capsys.readouterr().out
    assert "3 s late" in told
    assert "mode" not in told


def test_a_recorded_migration_is_replayed_as_far_as_a_policy_does_the_same(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    del planned  # but for its inventory
    assert app.run(["policy", "replay", str(TRACE), "--policy", "never-postcopy"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith("policy never-postcopy, mode precopy (recorded: balanced, completed)")
    assert told[1] == "decisions differ from 19.9 s onwards; recorded: switch to post-copy"
    assert told[2].startswith("at about 24.5 s: allow 200 ms of downtime, because ")
    assert told[-1].startswith("the migration completes after about ")
    assert app.run(["policy", "replay", str(TRACE), "--json"]) == 0
    json_ = json.loads(capsys.readouterr().out)
    assert [one["action"] for one in json_["decided"]] == ["switch to post-copy"]
