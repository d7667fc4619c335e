"""What can be done with guests and hosts, and by which commands."""

from types import SimpleNamespace
from typing import Any, cast

from tests.support.dashboards import at_row, dashboard
from tests.tui.still import Still
from vmckpt.model.guest import GuestState
from vmckpt_tui.action_lists import fleet
from vmckpt_tui.actions import Scene
from vmckpt_tui.screens.confirm import Order


async def test_several_marked_guests_are_one_cut() -> None:
    still = Still()
    app = dashboard(still)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "web1")
        await pilot.press("space", "space", "s")
        await pilot.pause()
        await pilot.press("ctrl+y")
        await pilot.pause()
    assert still.begun[0].words == ("snapshot", "create", "--group", "web1,web2")


async def test_a_busy_guest_is_not_moved_and_only_what_works_is_offered() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "busy")
        await pilot.press("m")
        await pilot.pause()
        assert not isinstance(app.screen, Order)
        assert not app.check_action("do", ("migrate",))
        assert app.check_action("do", ("snapshot",))


def test_only_active_guests_are_counted_as_such() -> None:
    guests: list[Any] = [
        SimpleNamespace(host="alpha", state=state, memory=1 << 30)
        for state in (GuestState.RUNNING, GuestState.PAUSED, GuestState.UNKNOWN)
    ]
    scene = SimpleNamespace(
        model=SimpleNamespace(fleet=SimpleNamespace(guests=guests)),
        host=SimpleNamespace(name="alpha"),
    )
    assert fleet._on_it(cast("Scene", scene)) == "2 active guests (2.0 GiB) and 1 other guest"
