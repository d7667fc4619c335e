"""Every screen as a picture; a change of one is looked at before it is accepted.

    VMCKPT_UPDATE=1 .venv/bin/python -m pytest tests/tui/test_pictures.py

A picture that differs is written beside the one it should be, as NAME.new.svg.
"""

import os
import time
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from tests.support.dashboards import dashboard
from tests.tui.still import NOW, Still
from vmckpt_tui.app import Dashboard
from vmckpt_tui.screens.detail import GuardScreen

BUSY = ("loading&#160;…", "running&#160;vmckpt", "no&#160;samples", "examining")
PICTURES = Path(__file__).parent / "pictures"
SIZES = [(80, 24), pytest.param((160, 48), marks=pytest.mark.long)]
SCREENS = {
    "fleet": (),
    "light-fleet": (),
    "light-migration": ("2", "enter"),
    "fleet-hosts": ("tab",),
    "fleet-marked": ("space", "space"),
    "fleet-filtered": ("slash", "w", "e", "b"),
    "order-migrate": ("end", "m"),
    "order-evacuate": ("tab", "e"),
    "jobs": ("2",),
    "migration": ("2", "enter"),
    "order-postcopy": ("2", "enter", "t"),
    "evacuation": ("2", "down", "down", "enter"),
    "replicas": ("3",),
    "protection": ("3", "enter"),
    "order-failover": ("3", "f"),
    "snapshots": ("4",),
    "order-restore": ("4", "r"),
    "policies": ("5",),
    "doctor": ("6",),
    "output": ("7",),
    "help": ("question_mark",),
}


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr(time, "time", lambda: NOW)
    # One look: how many there were by then would depend on the machine.
    monkeypatch.setattr(GuardScreen, "every", 1000.0)


async def settled(app: Dashboard, pilot: Pilot[None]) -> None:
    """Until nothing changes any more."""
    last = ""
    for _ in range(100):
        for one in app.screen.query(Input):
            one.cursor_blink = False
        await pilot.pause(0.05)
        drawn = app.export_screenshot(simplify=True)
        if drawn == last and not any(word in drawn for word in BUSY):
            return
        last = drawn


@pytest.mark.parametrize("size", SIZES, ids=["80x24", "160x48"])
@pytest.mark.parametrize("name", SCREENS)
async def test_it_looks_as_before(name: str, size: tuple[int, int]) -> None:
    app = dashboard(Still())
    async with app.run_test(size=size) as pilot:
        app.theme = "textual-light" if name.startswith("light") else "textual-dark"
        await settled(app, pilot)
        for key in SCREENS[name]:
            await pilot.press(key)
            await settled(app, pilot)
        drawn = app.export_screenshot(simplify=True)
    kept = PICTURES / f"{name}-{size[0]}x{size[1]}.svg"
    new = kept.with_suffix(".new.svg")
    if os.environ.get("VMCKPT_UPDATE"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(drawn)
    if not kept.exists() or kept.read_text() != drawn:
        new.write_text(drawn)
        raise AssertionError(f"it looks different: open {new} beside {kept.name}")
    new.unlink(missing_ok=True)


def test_no_picture_is_left_of_a_screen_that_is_gone() -> None:
    wanted = {f"{name}-{size}.svg" for name in SCREENS for size in ("80x24", "160x48")}
    assert {one.name for one in PICTURES.glob("*[0-9].svg")} == wanted
