"""The keys that are listed, and the actions that can be searched."""

from tests.support.dashboards import MODEL, dashboard, seen, until
from tests.tui.still import ENDED, Still
from vmckpt_tui.action_lists.all import TABLE
from vmckpt_tui.actions import Scene, Where
from vmckpt_tui.screens import help as keys
from vmckpt_tui.screens.help import Help


def test_the_part_that_one_is_in_comes_first_with_what_cannot_be_done_and_why() -> None:
    scene = Scene(where=Where.JOBS, model=MODEL, job=ENDED)
    (title, here), *others = keys.page(scene)
    assert title == "Jobs"
    told = {key: why for key, _, why in here}
    assert (told["c"], told["i"]) == ("the job has ended", "")
    assert {why for _, rows in others for _, _, why in rows} == {""}


def test_every_action_is_listed_wherever_it_can_be_done() -> None:
    listed = [row for _, rows in keys.page(None) for row in rows]
    assert len(listed) == sum(len(one.where) for one in TABLE)
    assert {(key, text) for key, text, _ in listed} == {(one.key, one.help) for one in TABLE}


async def test_help_says_why_not_now_and_leaves_by_its_own_key() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(160, 60)) as pilot:
        await pilot.pause()
        await pilot.press("2", "end", "question_mark")
        await pilot.pause()
        assert isinstance(app.screen, Help)
        assert "(not available: the job has ended)" in seen(app)
        await pilot.press("question_mark")
        await pilot.pause()
        assert app.screen is app.screen_stack[0]


async def test_an_action_is_found_by_its_words_and_begun() -> None:
    app = dashboard(Still())
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("ctrl+p", *"label")
        await until(pilot, "Set or remove a label")
        assert "resume the guest on the target now" not in seen(app)  # it is of another part
        await pilot.press("enter")
        await until(pilot, "KEY=VALUE, or KEY- to remove")
