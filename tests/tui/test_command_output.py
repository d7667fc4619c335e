"""Commands that were started from the dashboard, and what they print."""

from tests.support.dashboards import at_row, dashboard, seen
from tests.tui.still import Still
from vmckpt.model.events import Said


async def test_marked_guests_move_one_after_the_other_and_a_failure_ends_it() -> None:
    still = Still()
    app = dashboard(still)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "web1")
        await pilot.press("space", "space", "m")
        await pilot.pause()
        await pilot.press("ctrl+y")
        await pilot.pause(0.8)
        assert [one.words[1] for one in still.begun] == ["web1", "web2"]
        still.ends = Said(text="error: no room", code=21)
        app._begin((("migrate", "a"), ("migrate", "b")))
        await pilot.pause(0.8)
        assert still.begun[-1].words == ("migrate", "a")
        assert app.runs.all[-1].code == 21


async def test_what_a_command_says_can_be_read_and_it_can_be_interrupted() -> None:
    source = Still(ends=None)
    app = dashboard(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("s")
        await pilot.pause()
        await pilot.press("ctrl+y")
        await pilot.pause(0.5)
        await pilot.press("7")
        await pilot.pause()
        assert "under way" in seen(app)
        await pilot.press("i")
        await pilot.pause(0.7)
        assert source.begun[0].stopped
        assert "exit 130" in seen(app)


async def test_a_command_that_fails_says_its_last_word() -> None:
    app = dashboard(Still(ends=Said(text="looking\nerror: no room on gamma; free some", code=21)))
    async with app.run_test(size=(100, 30), notifications=True) as pilot:
        await pilot.pause()
        await pilot.press("s")
        await pilot.pause()
        await pilot.press("ctrl+y")
        await pilot.pause(0.7)
        assert "no room on gamma" in seen(app)
