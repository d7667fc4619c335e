"""A table's cursor, marks, order and text, as keys and the mouse change them."""

import dataclasses

from tests.support.dashboards import at_row, dashboard, seen
from tests.tui import still
from tests.tui.still import Still, guest
from vmckpt_tui.app import Dashboard, Pace, Setting
from vmckpt_tui.command_output import OutputPane
from vmckpt_tui.screens.confirm import Order
from vmckpt_tui.widgets.data_grid import Grid

LONG = "جهاز" * 50


async def test_names_of_any_kind_break_nothing() -> None:
    names = (LONG, "a\x1b[31mred", "two\nlines", "[bold]markup[/bold]", "😀" * 60, "\u202eevil", "")
    guests = tuple(guest(number, name, "alpha") for number, name in enumerate(names, 11))
    app = dashboard(Still(fleet_now=dataclasses.replace(still.FLEET, guests=guests)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        text = seen(app)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "[bold]markup" in text
        assert all(len(line) <= 80 for line in text.splitlines())
        for _ in guests:
            await pilot.press("m")
            await pilot.pause()
            assert isinstance(app.screen, Order)
            await pilot.press("escape", "down")


async def test_the_cursor_stays_with_its_guest_when_others_come_and_go() -> None:
    source = Still()
    app = Dashboard(Setting(source=source, commands=source, pace=Pace(fleet=0.05, share=1.0)))
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        grid = app.query_one("#guests", Grid)
        grid.point_at(f"{still.uuid(6)} alpha")
        source.fleet_now = dataclasses.replace(
            still.FLEET, guests=(guest(77, "aaa", "alpha"), *still.FLEET.guests[2:])
        )
        for _ in range(100):
            if grid.rows[0].name == "aaa":
                break
            await pilot.pause(0.05)
        assert grid.rows[0].name == "aaa"
        assert grid.current is not None
        assert grid.current.name == "safe"


async def test_the_mouse_works() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        grid = app.query_one("#guests", Grid)
        await pilot.click(grid, offset=(5, 3))
        assert grid.current is grid.rows[2]
        await pilot.click(grid, offset=(40, 0))
        await pilot.click("Tab:last-of-type")
        await pilot.pause()
        assert isinstance(app.pane, OutputPane)


async def test_a_guest_that_has_left_is_not_marked_when_it_comes_back() -> None:
    source = Still()
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "web1")
        await pilot.press("space")
        grid = app.query_one("#guests", Grid)
        gone = dataclasses.replace(still.FLEET, guests=still.FLEET.guests[1:])
        for fleet in (gone, still.FLEET):
            app.model = dataclasses.replace(app.model, fleet=fleet)
            app._show()
            await pilot.pause()
        assert grid.marked == set()


async def test_every_column_of_every_list_can_be_sorted_both_ways() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(200, 50)) as pilot:
        for key in "1234567":
            await pilot.press(key)
            await pilot.pause()
            for grid in app.pane.query(Grid):
                grid.focus()
                for _ in range(20):
                    await pilot.press("right_square_bracket")
                await pilot.press("left_square_bracket")
