"""The dashboard as somebody uses it: moving about, watching, things that go wrong."""

import dataclasses
import json
import random

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input, Static

from tests.tui import still
from tests.tui.still import ENDED, Still, guest
from tests.tui.test_actions import dashboard
from vmckpt.errors import JournalError
from vmckpt.model.events import Said
from vmckpt.model.guest import Copies, FleetNow
from vmckpt_tui.app import Dashboard, Pace, Setting
from vmckpt_tui.command_output import OutputPane
from vmckpt_tui.screens.confirm import Order
from vmckpt_tui.screens.detail import DrainScreen, GuardScreen, MoveScreen
from vmckpt_tui.screens.help import Help
from vmckpt_tui.widgets.basic import Trouble
from vmckpt_tui.widgets.data_grid import Grid

LONG = "جهاز" * 50


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
        assert "72% of it is done and would be thrown away" in seen(app)
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
        assert "0 arrived, 1 on their way, 1 wait" in seen(app)
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
        assert "an epoch: ─ the guest runs" in text
        await pilot.press("f")
        await pilot.pause()
        assert "110 ms of what it did on alpha is lost" in " ".join(seen(app).split())


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
        await until(pilot, "it is over: the guest runs on beta")


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
        assert "no host is known yet" in seen(app)
        for key, text in (("2", "no job has run yet"), ("3", "no guest is protected"),
                          ("4", "no snapshots"), ("7", "nothing was begun")):  # fmt: skip
            await pilot.press(key)
            await pilot.pause()
            assert text in seen(app)


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


async def test_five_thousand_guests_are_filtered_sorted_and_paged() -> None:
    dice = random.Random(1)
    many = tuple(guest(n, f"vm{n:05}", dice.choice(("alpha", "beta"))) for n in range(5000))
    app = dashboard(Still(fleet_now=dataclasses.replace(still.FLEET, guests=many)))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "5,000 guests" in seen(app)
        await pilot.press("end")
        await pilot.pause()
        assert "vm04999" in seen(app)
        await pilot.press("home", "slash")
        for letter in "vm0499":
            await pilot.press(letter)
        await pilot.pause()
        assert "10 of 5,000 guests" in seen(app)
        await pilot.press("escape")
        await pilot.pause()
        assert not app.query_one(Input).value
        await pilot.press("right_square_bracket", "right_square_bracket")
        await pilot.pause()
        grid = app.query_one("#guests", Grid)
        assert [one.host for one in grid.rows] == sorted(one.host for one in grid.rows)


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


async def test_a_host_that_is_chosen_shows_its_guests_alone() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("tab", "down", "enter")
        await pilot.pause()
        grid = app.query_one("#guests", Grid)
        assert {one.host for one in grid.rows} == {"beta"}
        await pilot.press("escape")
        await pilot.pause()
        assert len(grid.rows) == 6


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


async def test_the_doctor_is_asked_once_and_again_on_demand() -> None:
    found = json.dumps([
        {"code": "clock", "severity": "warning", "where": "alpha", "text": "3 s late",
         "mend": "start chrony"},
        {"code": "fine", "severity": "ok", "where": "beta", "text": "all well", "mend": None},
    ])  # fmt: skip
    source = Still(answers={"doctor": Said(text=found + "\nerror: 1 finding", code=21)})
    app = dashboard(source)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("6")
        await until(pilot, "3 s late")
        assert "→ start chrony" in str(app.query_one("#mend", Static).content)
        await pilot.press("r")
        await pilot.pause(0.2)
        assert len([one for one in source.asked if one[0] == "doctor"]) == 2


async def test_jobs_are_searched() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("2", "slash", *"done", "enter")
        await pilot.pause()
        rows = app.pane.query_one(Grid).rows
        assert [one.operation.id for one in rows] == [ENDED.operation.id]


async def test_policies_tell_how_many_guests_get_each() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.press("5")
        await pilot.pause(0.3)
        found = {one.policy.name: one.guests for one in app.pane.query_one(Grid).rows}
        assert sum(found.values()) == len(still.FLEET.guests)
        assert found["balanced"] == len(still.FLEET.guests)


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


async def test_a_look_that_waited_for_a_dead_host_is_not_followed_by_a_long_rest() -> None:
    """Nine seconds for a host that had just died, and the next look came a minute and a half
    later."""
    pace = Pace()
    assert pace.pause(2.0, 0.1) == 2.0
    assert pace.pause(2.0, 0.5) == 5.0
    assert pace.pause(2.0, 9.0) == 10.0
    assert pace.pause(60.0, 9.0) == 60.0


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
        await until(pilot, "two copies: web2 runs on alpha and gamma; run vmckpt recover")
        await until(pilot, "two copies: safe runs on alpha and beta: its standby has taken over")
        lines = seen(app).splitlines()
        marked = [line for line in lines if "✗ 2 copies" in line]
        assert any("web2" in line for line in marked)
        assert any("safe" in line for line in marked)
        assert not any("web1" in line for line in marked)
        await pilot.press("3")
        await until(pilot, "✗ 2 copies")
