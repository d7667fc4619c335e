"""The dashboard as somebody uses it: moving about, watching, things that go wrong."""

import dataclasses
import json

import pytest

from tests.support.dashboards import POLICIES, dashboard, seen, until
from tests.tui import still
from tests.tui.still import Still
from vmckpt.errors import JournalError
from vmckpt.model.guest import FleetNow
from vmckpt.policy.loader import Shelf
from vmckpt_tui.app import Dashboard, Pace, Setting
from vmckpt_tui.screens.detail import MoveScreen
from vmckpt_tui.screens.help import Help
from vmckpt_tui.widgets.basic import Trouble
from vmckpt_tui.widgets.data_grid import Grid


@pytest.mark.parametrize("size", [(80, 24), (160, 48), (40, 10), (200, 60)])
async def test_every_part_can_be_shown_at_any_size(size: tuple[int, int]) -> None:
    app = dashboard(Still())
    async with app.run_test(size=size) as pilot:
        for key in "1234567":
            await pilot.press(key)
            await pilot.pause()
        await pilot.press("1", "question_mark")
        await pilot.pause()
        assert isinstance(app.screen, Help)
        await pilot.press("escape")
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert seen(app)


async def test_what_cannot_be_asked_is_told_and_what_was_known_stays() -> None:
    source = Still()
    app = Dashboard(Setting(source=source, commands=source, pace=Pace(
        jobs=0.1, past=0.1, fleet=0.1, guard=0.1, snapshots=0.1, share=1.0
    )))  # fmt: skip
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, "web1")
        source.trouble = JournalError("the database does not answer", hint="start it")
        await until(pilot, "the database does not answer")
        assert app.query_one(Trouble).display
        assert "the database does not answer" in seen(app)
        assert "web1" in seen(app)
        await pilot.press("2", "enter")
        await until(pilot, "✗ the database does not answer")
        await pilot.press("escape")
        await pilot.press("y")  # nothing to be copied is no end of the dashboard
        source.trouble = None
        for _ in range(100):
            if not app.query_one(Trouble).display:
                break
            await pilot.pause(0.1)
        assert not app.query_one(Trouble).display


async def test_an_empty_fleet_looks_intended() -> None:
    source = Still(fleet_now=FleetNow(at=1.0), views=(), entries={}, kept=())
    app = dashboard(source)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "no hosts yet" in seen(app)
        for key, text in (("2", "no job has run yet"), ("3", "no guest is protected"),
                          ("4", "no snapshots"), ("7", "no command has been started")):  # fmt: skip
            await pilot.press(key)
            await pilot.pause()
            assert text in seen(app)


async def test_a_job_is_copied_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    app = dashboard(Still())
    copied: list[str] = []
    monkeypatch.setattr(app, "copy_to_clipboard", copied.append)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("2", "y")
        await pilot.pause()
    assert json.loads(copied[0])["job"] == "m-7k3f"


async def test_whoever_orders_a_migration_gets_to_see_it() -> None:
    source = Still(ends=None)
    app = Dashboard(Setting(source=source, commands=source, here="desk",
                            pace=Pace(jobs=0.1, share=1.0)))  # fmt: skip
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("end", "m")
        await pilot.pause()
        await pilot.press("ctrl+y")
        await pilot.pause()
        ours = dataclasses.replace(
            still.MOVE.operation,
            controller=dataclasses.replace(still.MOVE.operation.controller, pid=1000),
        )
        source.views = (dataclasses.replace(still.MOVE, operation=ours),)
        for _ in range(100):
            if isinstance(app.screen, MoveScreen):
                return
            await pilot.pause(0.05)
        raise AssertionError(seen(app))


async def test_what_still_arrives_while_it_closes_is_nothing_to_it() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        grid = app.query(Grid).first()
    assert not app.screen_stack
    app.on_grid_moved(Grid.Moved(grid))
    app.on_grid_chosen(Grid.Chosen(grid))


async def test_a_look_that_waited_for_a_dead_host_is_not_followed_by_a_long_rest() -> None:
    """Nine seconds for a host that had just died, and the next look came a minute and a half
    later."""
    pace = Pace()
    assert pace.pause(2.0, 0.1) == 2.0
    assert pace.pause(2.0, 0.5) == 5.0
    assert pace.pause(2.0, 9.0) == 10.0
    assert pace.pause(60.0, 9.0) == 60.0


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


async def test_who_leaves_is_told_that_some_would_never_begin() -> None:
    app = dashboard(Still(ends=None))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        app._begin((("migrate", "a"), ("migrate", "b")))
        await pilot.press("q")
        await pilot.pause()
        assert app.is_running
        assert app.return_code is None
        await pilot.press("q")
    assert app.return_code == 0
