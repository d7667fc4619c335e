"""What an order is about, and when a yes is taken."""

import asyncio
import dataclasses
from collections.abc import Sequence

import pytest
from textual.geometry import Spacing
from textual.widgets import Button

from tests.tui import still
from tests.tui.still import Still, snapshot
from tests.tui.test_actions import at_row, dashboard
from vmckpt.model.events import Said
from vmckpt.model.guest import SnapshotNow
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME
from vmckpt_tui.actions import Model, Scene, Where
from vmckpt_tui.screens.confirm import Order
from vmckpt_tui.widgets.data_grid import Grid


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


def of(*chosen: SnapshotNow, every: tuple[SnapshotNow, ...] = ()) -> Scene:
    model = Model(fleet=still.FLEET, snapshots=(*chosen, *every))
    return Scene(where=Where.SNAPSHOTS, model=model, snapshots=chosen)


@pytest.mark.parametrize("name", ["delete", "verify", "diff", "prune", "gc"])
def test_snapshots_of_two_stores_are_not_one_order(name: str) -> None:
    near, far = snapshot("s-a", 1, "a"), dataclasses.replace(snapshot("s-b", 1, "b"), store="far")
    assert actions.why_not(BY_NAME[name], of(near, far)) == "they are in several stores: far, main"


def test_to_restore_a_group_names_all_that_is_lost() -> None:
    one, two = (snapshot(f"s-{n}", n, "cut", group="g-1") for n in (1, 2))
    told = BY_NAME["restore"].costs(of(one, every=(two,)), {"group": "yes"})
    assert told is not None
    assert "web1, web2 are ended" in told
    assert "40 GiB" in told


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
