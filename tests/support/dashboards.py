"""Dashboards over a source that stands still: how to go about them, and what they show."""

from collections.abc import Sequence
from typing import Any

from textual.app import App
from textual.pilot import Pilot

from tests.tui.still import DRAIN, ENDED, FLEET, MOVE, SNAPSHOTS, Still, entry
from vmckpt.model.guest import GuestNow
from vmckpt.policy import loader
from vmckpt_tui.actions import Model
from vmckpt_tui.app import Dashboard, Setting
from vmckpt_tui.tables import Column
from vmckpt_tui.widgets.data_grid import Grid

POLICIES = loader.survey(loader.folder(None, None)).policies
PARTS = {
    "fleet": "1", "jobs": "2", "guard": "3", "snapshots": "4", "policies": "5", "doctor": "6",
}  # fmt: skip
MODEL = Model(
    fleet=FLEET, jobs=(MOVE, DRAIN, ENDED), protections={"p-9abc": entry()}, snapshots=SNAPSHOTS
)


def dashboard(still: Still, *, read_only: bool = False) -> Dashboard:
    return Dashboard(
        Setting(source=still, commands=still, policies=POLICIES,
                read_only=read_only)
    )  # fmt: skip


async def at_row(app: Dashboard, pilot: Pilot[None], part: str, row: str) -> None:
    """Go there as keys would, and put the cursor on that row."""
    await pilot.press(PARTS[part])
    await pilot.pause()
    grid = app.pane.main()
    assert isinstance(grid, Grid)
    if row.startswith("host "):
        await pilot.press("tab")
        grid, row = app.query_one("#hosts", Grid), row.removeprefix("host ")
    named = {one.name: f"{one.uuid} {one.host}" for one in still_guests(app)}
    grid.point_at(named.get(row, row))
    await pilot.pause()


def still_guests(app: Dashboard) -> tuple[GuestNow, ...]:
    return app.model.fleet.guests


async def until(pilot: Pilot[None], *texts: str, limit: float = 10.0) -> None:
    """Wait until the screen has all of that."""
    for _ in range(int(limit / 0.05)):
        if all(text in seen(pilot.app) for text in texts):
            return
        await pilot.pause(0.05)
    raise AssertionError(f"{texts} never came:\n{seen(pilot.app)}")


def seen(app: App[None]) -> str:
    """All text on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(part.text for part in strip) for strip in strips)


def cells(columns: Sequence[Column[Any]], row: object) -> list[str]:
    return [one.cell(row)[0] for one in columns]
