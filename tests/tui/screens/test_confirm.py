"""What an order asks, and when a yes is taken."""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from textual.geometry import Spacing
from textual.widgets import Button, Select

from tests.support.dashboards import at_row, dashboard
from tests.tui.still import FLEET, Still, snapshot
from vmckpt.model.events import Said
from vmckpt.model.guest import HostNow
from vmckpt_tui.screens.confirm import Order


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


async def test_a_second_enter_closes_nothing_else() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("2", "enter")
        await pilot.pause(0.3)
        below = app.screen
        await pilot.press("c")
        await pilot.pause()
        button = app.screen.query_one("#no", Button)
        button.press()
        button.press()
        await pilot.pause()
        assert app.screen is below


class Slow(Still):
    """Looks take until somebody lets them."""

    go: asyncio.Event

    async def ask(self, words: Sequence[str], width: int) -> Said:
        await self.go.wait()
        return await super().ask(words, width)


async def test_what_destroys_is_not_done_before_it_was_shown_what() -> None:
    source = Slow()
    source.go = asyncio.Event()
    app = dashboard(source)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("4", "g")
        await pilot.pause()
        await pilot.press("ctrl+y")
        await pilot.pause()
        assert isinstance(app.screen, Order)
        source.go.set()
        for _ in range(100):
            if not app.screen.query_one("#yes", Button).disabled:
                break
            await pilot.pause(0.05)
        await pilot.press("ctrl+y")
        await pilot.pause()
    assert [one.words[:2] for one in source.begun] == [("snapshot", "gc")]


@pytest.mark.parametrize("size", [(40, 12), (30, 8), (80, 24)])
@pytest.mark.parametrize("key", ["e", "m"])
async def test_yes_and_no_are_in_sight_however_small_the_terminal(
    size: tuple[int, int], key: str
) -> None:
    app = dashboard(Still())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "web1")
        await pilot.press(key)
        await pilot.pause()
        assert isinstance(app.screen, Order)
        await pilot.resize_terminal(*size)
        await pilot.pause()
        inside = app.screen.query_one("#box").region.shrink(Spacing(1, 1, 1, 1))
        assert inside.bottom < size[1]
        for name in ("#no", "#yes"):
            at = app.screen.query_one(name, Button).region
            assert at.height == 1
            assert inside.contains(at.x, at.y)
