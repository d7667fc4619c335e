"""The screens of one migration, one evacuation and one protection."""

import dataclasses

from tests.support.dashboards import dashboard, seen, until
from tests.tui import still
from tests.tui.still import Still
from vmckpt_tui.screens import detail
from vmckpt_tui.screens.detail import DrainScreen, GuardScreen, MoveScreen
from vmckpt_tui.widgets.data_grid import Grid


async def test_a_migration_is_watched() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        await pilot.press("2", "enter")
        await pilot.pause(0.6)
        assert isinstance(app.screen, MoveScreen)
        text = seen(app)
        assert "m-7k3f busy: beta → gamma · pre-copy · 72%" in text
        assert "because the last passes got no smaller" in text
        assert "limit 300 ms" in text
        assert "— remaining" in text
        await pilot.press("c")
        await pilot.pause()
        assert "72% is done and will be discarded" in seen(app)
        await pilot.press("escape", "escape")
        await pilot.pause()
        assert app.screen is app.screen_stack[0]


async def test_an_evacuation_is_watched_and_leads_to_its_moves() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        await pilot.press("2")
        app.pane.query_one(Grid).point_at("e-4b7x")
        await pilot.press("enter")
        await pilot.pause(0.4)
        assert isinstance(app.screen, DrainScreen)
        assert "0 arrived, 1 moving, 1 waiting" in seen(app)
        await pilot.press("enter")
        await pilot.pause(0.4)
        assert isinstance(app.screen, MoveScreen)


async def test_a_protection_is_watched() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(160, 48)) as pilot:
        await pilot.pause()
        await pilot.press("3", "enter")
        await pilot.pause(0.4)
        assert isinstance(app.screen, GuardScreen)
        text = seen(app)
        assert "behind (RPO) 110 ms, worst 400 ms" in text
        assert "epoch: ─ guest runs" in text
        await pilot.press("f")
        await pilot.pause()
        assert "110 ms of its work on alpha is lost" in " ".join(seen(app).split())


async def test_a_protection_that_ended_meanwhile_says_so() -> None:
    source = Still()
    app = dashboard(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("3", "enter")
        await pilot.pause(0.3)
        source.entries = {}
        report = dataclasses.replace(
            still.PROTECT.operation, ended_at=still.NOW, outcome="completed",
            report={"why": "the guest runs on beta"},
        )  # fmt: skip
        source.views = (dataclasses.replace(still.PROTECT, operation=report),)
        await until(pilot, "ended: the guest runs on beta")


def test_extremes_are_given_with_the_period_that_the_samples_cover() -> None:
    assert detail._since(1) == "since this screen was opened"
    assert detail._since(detail._BEATS) == "in the last 300 samples"
