"""vmckpt run: what a dry run shows, and what is refused at once."""

import json

import pytest

from tests.support.services import POLICY, World, world
from vmckpt.cli import app
from vmckpt.errors import PolicyError

__all__ = ["world"]


def test_a_dry_run_says_what_is_due_and_why(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    path = world.stock.folder / "policies/mine.yaml"
    path.write_text(POLICY + "  - {name: paying, every: auto}\n")
    inventory = str(world.stock.folder / "hosts.yaml")
    assert app.run(["run", "--dry-run", "--inventory", inventory]) == 0
    shown = capsys.readouterr().out
    assert "mine/often" in shown
    assert "no snapshot yet" in shown
    assert "web1, paying: C = 5.0 s (assumed: no recent snapshot is recorded); M = " in shown
    assert "sqrt(2CM)" in shown
    assert app.run(["run", "--dry-run", "--json", "--inventory", inventory]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["schedule"] for one in told["schedules"]] == ["often", "paying"]
    assert [one["what"] for one in told["due"]] == ["take", "collect", "collect"]
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
    assert "no policy has schedules for snapshots; add snapshots: [" in capsys.readouterr().err


def test_a_dry_run_without_schedules_says_so(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (world.stock.folder / "policies").glob("*.yaml"):
        path.unlink()
    inventory = str(world.stock.folder / "hosts.yaml")
    assert app.run(["run", "--dry-run", "--inventory", inventory]) == 0
    assert "no guest has a schedule for snapshots" in capsys.readouterr().out
