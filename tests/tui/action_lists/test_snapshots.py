"""What can be done with snapshots, by which commands, and what it costs."""

import dataclasses

import pytest

from tests.tui import still
from tests.tui.still import FLEET, snapshot
from vmckpt.model.guest import SnapshotNow
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME
from vmckpt_tui.actions import Model, Scene, Where


def of(*chosen: SnapshotNow, every: tuple[SnapshotNow, ...] = ()) -> Scene:
    model = Model(fleet=still.FLEET, snapshots=(*chosen, *every))
    return Scene(where=Where.SNAPSHOTS, model=model, snapshots=chosen)


def test_to_prune_begins_with_the_schedule_of_the_one_under_the_cursor() -> None:
    every = tuple(
        dataclasses.replace(snapshot(f"s-{name}", 1, name), schedule=name)
        for name in ("hourly", "nightly")
    )
    model = Model(fleet=FLEET, snapshots=every)
    scene = Scene(where=Where.SNAPSHOTS, model=model, snapshots=every[1:])
    prune = BY_NAME["prune"]
    [schedule, *_] = prune.fields(scene)
    assert schedule.value == "nightly"
    assert actions.about(prune, scene) == "in main"


@pytest.mark.parametrize("name", ["delete", "verify", "diff", "prune", "gc"])
def test_snapshots_of_two_stores_are_not_one_order(name: str) -> None:
    near, far = snapshot("s-a", 1, "a"), dataclasses.replace(snapshot("s-b", 1, "b"), store="far")
    why = actions.why_not(BY_NAME[name], of(near, far))
    assert why == "the selected snapshots are in several stores: far, main"


def test_to_restore_a_group_names_all_that_is_lost() -> None:
    one, two = (snapshot(f"s-{n}", n, "cut", group="g-1") for n in (1, 2))
    told = BY_NAME["restore"].costs(of(one, every=(two,)), {"group": "yes"})
    assert told is not None
    assert "web1, web2 are stopped" in told
    assert "40 GiB" in told
