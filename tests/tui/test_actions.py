"""What an action is about, and the command that it is."""

import shlex

import pytest

from tests.support.dashboards import MODEL, at_row, dashboard
from tests.tui import still
from tests.tui.still import FLEET, MOVE, NOW, Still
from vmckpt.errors import ReadOnly
from vmckpt.model.guest import FleetNow
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME
from vmckpt_tui.actions import Model, Scene, Where, line
from vmckpt_tui.screens.confirm import Order


async def test_who_may_only_look_is_offered_no_deeds() -> None:
    still = Still()
    app = dashboard(still, read_only=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, "fleet", "web1")
        await pilot.press("m")
        assert not isinstance(app.screen, Order)
        await pilot.press("x")
        await pilot.pause()
        assert isinstance(app.screen, Order)
    assert not still.begun
    assert ReadOnly.exit_code


def test_a_guest_is_called_by_its_uuid_if_its_name_is_none_for_a_command() -> None:
    scene = Scene(where=Where.FLEET, model=MODEL)
    assert scene.called(still.guest(1, "web1", "alpha")) == "web1"
    assert scene.called(still.guest(7, "--force", "alpha")) == still.uuid(7)
    assert scene.called(still.guest(8, "مرحبا", "alpha")) == still.uuid(8)
    twins = Model(fleet=FleetNow(at=NOW, guests=(
        still.guest(1, "twin", "alpha"), still.guest(2, "twin", "beta")
    )))  # fmt: skip
    assert Scene(where=Where.FLEET, model=twins).called(twins.fleet.guests[0]) == still.uuid(1)


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (("label", "web1", "a=b"), "vmckpt label web1 a=b"),
        (("snapshot", "create", "web1", "--name", "two words"),
         "vmckpt snapshot create web1 --name 'two words'"),
        (("label", "it's", ""), r"vmckpt label 'it'\''s' ''"),
        (("label", "$(reboot)"), "vmckpt label '$(reboot)'"),
    ],
)  # fmt: skip
def test_a_command_is_shown_as_a_shell_takes_it(words: tuple[str, ...], typed: str) -> None:
    assert line(words) == typed
    assert shlex.split(typed) == ["vmckpt", *words]


def test_a_target_is_the_freest_open_host_without_the_guest() -> None:
    scene = Scene(where=Where.FLEET, model=MODEL, guests=FLEET.guests[4:5])
    field = actions.target(scene)
    assert field.value == "gamma"
    assert [value for _, value in field.choices or ()] == ["gamma", "alpha"]
    alone = actions.target(Scene(where=Where.FLEET, model=Model()))
    assert (alone.value, alone.choices) == ("", ())


def test_only_fields_that_are_needed_are_missing() -> None:
    scene = Scene(where=Where.FLEET, model=MODEL, guests=FLEET.guests[:1])
    assert actions.missing(BY_NAME["label"], scene, {}) == "label?"
    assert actions.missing(BY_NAME["label"], scene, {"label": "a=b"}) is None
    assert actions.missing(BY_NAME["snapshot"], scene, {"memory": "yes"}) is None


def test_what_it_is_about_is_told_in_a_few_words() -> None:
    two = Scene(where=Where.FLEET, model=MODEL, guests=FLEET.guests[:2], host=FLEET.hosts[0])
    assert actions.about(BY_NAME["migrate"], two) == "web1 and 1 more"
    assert actions.about(BY_NAME["evacuate"], two) == "alpha"
    one = Scene(where=Where.JOBS, model=MODEL, job=MOVE)
    assert actions.about(BY_NAME["cancel"], one) == "m-7k3f busy"


def test_an_action_of_another_part_is_not_done_here() -> None:
    scene = Scene(where=Where.JOBS, model=MODEL, guests=FLEET.guests[:1])
    assert actions.why_not(BY_NAME["label"], scene) == "not available here"
