"""A restore that was interrupted is finished or undone, and nothing in doubt is deleted."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.interrupted_restores import ID, NEW, OLD, FakeMonitor, order, swap
from vmckpt.agent.orders import UnrestoreOrder
from vmckpt.agent.restore import replace_file, undo_restore

__all__ = ["order"]


def contents(order: UnrestoreOrder) -> dict[str, str]:
    folder = Path(order.images["vda"]).parent
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_before_it_had_made_way_nothing_there_is_touched(
    order: UnrestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old guest runs on, and its restore has not happened."""
    monkeypatch.setattr(FakeMonitor, "state", "running")
    told = undo_restore.unrestore(replace(order, made=None))
    assert (told["verdict"], contents(order)) == ("back", {"vda": OLD, "vdb": OLD})
    assert told["did"] == ["remove unused images"]


def test_killed_between_two_disks_it_is_as_before(order: UnrestoreOrder) -> None:
    swap(order, "vda")
    dry = undo_restore.unrestore(replace(order, dry=True))
    assert len(contents(order)) == 4
    told = undo_restore.unrestore(order)
    assert (told["verdict"], told["did"]) == (dry["verdict"], dry["did"])
    assert contents(order) == {"vda": OLD, "vdb": OLD}
    assert undo_restore.unrestore(order)["did"] == []


def test_a_guest_that_came_up_on_half_of_it_keeps_all_files(
    order: UnrestoreOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(order, "vda")
    monkeypatch.setattr(FakeMonitor, "state", "running")
    told = undo_restore.unrestore(order)
    assert (told["verdict"], told["did"], len(contents(order))) == ("unclear", [], 4)
    assert len(told["left"]) == 2


@pytest.mark.parametrize("revived", [True, False])
def test_a_guest_that_runs_has_its_memory_only_if_it_was_not_booted(
    order: UnrestoreOrder, monkeypatch: pytest.MonkeyPatch, revived: bool
) -> None:
    swap(order, "vda", "vdb")
    monkeypatch.setattr(FakeMonitor, "state", "running")
    monkeypatch.setattr(undo_restore, "_revived", lambda _: revived)
    told = undo_restore.unrestore(order)
    assert told["verdict"] == ("arrived" if revived else "unclear")
    assert len(contents(order)) == (2 if revived else 4)


def test_a_fork_that_was_not_started_leaves_nothing(order: UnrestoreOrder) -> None:
    for name, path in order.images.items():
        Path(path).unlink()
        replace_file.paths(Path(path), ID)[0].rename(path)
        assert replace_file.mark(Path(path)) == (order.made or {})[name]
    told = undo_restore.unrestore(replace(order, empty=("vda", "vdb")))
    assert (told["verdict"], contents(order)) == ("back", {})
    assert told["did"] == ["remove the restored images"]


def test_nvram_goes_as_the_disks_do(order: UnrestoreOrder) -> None:
    vars_ = Path(order.images["vda"]).with_name("vars.fd")
    vars_.write_text(NEW)
    replace_file.paths(vars_, ID)[1].write_text(OLD)
    swap(order, "vda", "vdb")
    undo_restore.unrestore(replace(order, images={**order.images, "nvram": str(vars_)}))
    assert contents(order) == {"vda": OLD, "vdb": OLD, "vars.fd": OLD}
