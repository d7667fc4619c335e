"""The line at the top, and what is told below it."""

import dataclasses

from tests.support.dashboards import dashboard, seen, until
from tests.tui import still
from tests.tui.still import Still
from vmckpt.model.guest import Copies


async def test_a_narrow_terminal_says_where_one_is_and_where_help_is() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(56, 20)) as pilot:
        await pilot.press("2")
        await until(pilot, "2 Jobs", "? help")
        head = seen(app).splitlines()[0]
        assert "7" in head
        assert "Policies" not in head
        await pilot.resize_terminal(100, 20)
        await until(pilot, "5 Policies", "7 Output")


async def test_a_guest_with_two_copies_is_above_everything_and_in_its_lines() -> None:
    over = {"role": "backup", "outcome": "failed-over", "why": "silent", "runs": True}
    entry = still.entry(runs=True)
    entry["says"]["beta"] = over
    twice = Copies(guest="web2", uuid=still.uuid(2), hosts=("alpha", "gamma"))
    source = Still(
        fleet_now=dataclasses.replace(still.FLEET, copies=(twice,)), entries={"p-9abc": entry}
    )
    app = dashboard(source)
    async with app.run_test(size=(160, 48)) as pilot:
        await until(pilot, "two copies: web2 is running on alpha and gamma; run vmckpt recover")
        await until(
            pilot, "two copies: safe may be running on alpha and beta: its standby has taken over"
        )
        lines = seen(app).splitlines()
        marked = [line for line in lines if "✗ 2 copies" in line]
        assert any("web2" in line for line in marked)
        assert any("safe" in line for line in marked)
        assert not any("web1" in line for line in marked)
        await pilot.press("3")
        await until(pilot, "✗ 2 copies")
