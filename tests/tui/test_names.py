"""Names that look like markup, and orders that are about what the cursor is on."""

import dataclasses

from textual.widgets import Select

from tests.tui.still import FLEET, Still, snapshot
from tests.tui.test_actions import POLICIES, at_row, dashboard
from vmckpt.model.guest import HostNow
from vmckpt.policy.loader import Shelf
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME
from vmckpt_tui.actions import Model, Scene, Where
from vmckpt_tui.app import Dashboard, Setting
from vmckpt_tui.screens.confirm import Order
from vmckpt_tui.widgets.data_grid import Grid


async def test_a_host_or_schedule_whose_name_is_markup_is_a_name() -> None:
    source = Still()
    odd = HostNow(name="be[/b]ta [rack red]")
    source.fleet_now = dataclasses.replace(FLEET, hosts=(*FLEET.hosts, odd))
    source.kept = (dataclasses.replace(snapshot("s-a", 1, "a"), schedule="[/evil]"),)
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "db1")
        await pilot.press("m")
        await pilot.pause()
        assert isinstance(app.screen, Order)
        choices = [str(label) for label, _ in app.screen.query_one(Select)._options]
        assert "be[/b]ta [rack red]" in " ".join(choices)
        await pilot.press("escape")
        await pilot.press("4", "p")
        await pilot.pause()
        assert isinstance(app.screen, Order)
        assert "[/evil]" in [str(label) for label, _ in app.screen.query_one(Select)._options]


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


def test_to_prune_begins_with_the_schedule_of_the_one_under_the_cursor() -> None:
    every = tuple(
        dataclasses.replace(snapshot(f"s-{name}", 1, name), schedule=name)
        for name in ("hourly", "nightly")
    )
    model = Model(fleet=FLEET, snapshots=every)
    scene = Scene(where=Where.SNAPSHOTS, model=model, snapshots=every[1:])
    prune = BY_NAME["prune"]
    [schedule, *_] = prune.fields(scene)
    assert schedule.value == "nightly"
    assert actions.about(prune, scene) == "in main"


async def test_a_policy_file_that_is_broken_is_told() -> None:
    wrong = ("shop.yaml:3: unknown key 'mdoe'", "b.yaml: no name")
    source = Still()
    made = Dashboard(
        Setting(
            source=source, commands=source, policies=POLICIES, wrong_policies=Shelf((), wrong).wrong
        )
    )
    async with made.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.3)
        assert made.model.trouble["policies"] == f"{wrong[0]} (and 1 more)"
