"""The lists of the dashboard: what they show, and what the cursor and marks choose."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
from textual.widgets import Input, Static

from tests.support.dashboards import at_row, dashboard, seen, until
from tests.support.following import take
from tests.tui import still
from tests.tui.still import ENDED, Still, guest
from vmckpt import inventory
from vmckpt.app import policies
from vmckpt.cli import app as cli
from vmckpt.errors import PolicyError
from vmckpt.model.events import Said
from vmckpt_tui.app import Dashboard, Setting
from vmckpt_tui.screens.confirm import Order
from vmckpt_tui.widgets.data_grid import Grid


async def test_five_thousand_guests_are_filtered_sorted_and_paged() -> None:
    dice = random.Random(1)
    many = tuple(guest(n, f"vm{n:05}", dice.choice(("alpha", "beta"))) for n in range(5000))
    app = dashboard(Still(fleet_now=dataclasses.replace(still.FLEET, guests=many)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "5,000 guests" in seen(app)
        await pilot.press("end")
        await pilot.pause()
        assert "vm04999" in seen(app)
        await pilot.press("home", "slash")
        for letter in "vm0499":
            await pilot.press(letter)
        await pilot.pause()
        assert "10 of 5,000 guests" in seen(app)
        await pilot.press("escape")
        await pilot.pause()
        assert not app.query_one(Input).value
        await pilot.press("right_square_bracket", "right_square_bracket")
        await pilot.pause()
        grid = app.query_one("#guests", Grid)
        assert [one.host for one in grid.rows] == sorted(one.host for one in grid.rows)


async def test_a_host_that_is_chosen_shows_its_guests_alone() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("tab", "down", "enter")
        await pilot.pause()
        grid = app.query_one("#guests", Grid)
        assert {one.host for one in grid.rows} == {"beta"}
        await pilot.press("escape")
        await pilot.pause()
        assert len(grid.rows) == 6


async def test_the_doctor_is_asked_once_and_again_on_demand() -> None:
    found = json.dumps([
        {"code": "clock", "severity": "warning", "where": "alpha", "text": "3 s late",
         "hint": "start chrony"},
        {"code": "fine", "severity": "ok", "where": "beta", "text": "all well", "hint": None},
    ])  # fmt: skip
    source = Still(answers={"doctor": Said(text=found + "\nerror: 1 finding", code=21)})
    app = dashboard(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("6")
        await until(pilot, "3 s late")
        assert "→ start chrony" in str(app.query_one("#hint", Static).content)
        await pilot.press("r")
        await pilot.pause(0.2)
        assert len([one for one in source.asked if one[0] == "doctor"]) == 2


async def test_jobs_are_searched() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("2", "slash", *"done", "enter")
        await pilot.pause()
        rows = app.pane.query_one(Grid).rows
        assert [one.operation.id for one in rows] == [ENDED.operation.id]


async def test_policies_tell_how_many_guests_get_each() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("5")
        await pilot.pause(0.3)
        found = {one.policy.name: one.guests for one in app.pane.query_one(Grid).rows}
        assert sum(found.values()) == len(still.FLEET.guests)
        assert found["balanced"] == len(still.FLEET.guests)


async def test_a_host_is_that_of_the_cursor_wherever_guests_are_marked() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        first = app.model.fleet.guests[0]
        await at_row(app, pilot, "fleet", first.name)
        await pilot.press("space")
        other = next(one for one in app.model.fleet.guests if one.host != first.host)
        grid = app.pane.main()
        assert isinstance(grid, Grid)
        grid.point_at(f"{other.uuid} {other.host}")
        await pilot.pause()
        scene = app.scene()
        assert scene is not None
        assert [one.name for one in scene.guests] == [first.name]
        assert scene.host is not None
        assert scene.host.name == other.host


async def test_a_mark_is_only_taken_where_marks_count() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "host alpha")
        await pilot.press("space", "e")
        await pilot.pause()
        assert isinstance(app.screen, Order)
        assert app.screen._scene.host is not None
        assert app.screen._scene.host.name == "alpha"


async def test_policies_that_cannot_be_read_are_explained_by_the_command_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts: {alpha: {uri: 'test:///default'}}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_POLICIES", str(tmp_path / "policies"))
    with pytest.raises(PolicyError) as caught:
        policies.survey_policies(inventory.load(tmp_path / "hosts.yaml"))
    source = Still()
    app = Dashboard(Setting(source=source, commands=source, wrong_policies=str(caught.value)))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("5")
        await until(pilot, "no policy can be read")
        (listing,) = take(next(line for line in seen(app).splitlines() if "no policy" in line))
    assert cli.run(list(listing.words[1:])) != 0
    assert f"{tmp_path}/policies: no such directory" in capsys.readouterr().err
    (tmp_path / "policies").mkdir()
    assert cli.run(list(listing.words[1:])) == 0
