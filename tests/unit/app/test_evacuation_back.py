"""Who is brought back to a host, from what the journal has of its emptyings."""

from pathlib import Path

import pytest

from vmckpt.app import evacuation
from vmckpt.evacuation import service
from vmckpt.evacuation.report import arrived_of
from vmckpt.journal import evacuation_progress, jobs, maintenance
from vmckpt.journal import location as locations
from vmckpt.journal.evacuation_progress import MOVE
from vmckpt.journal.records import NewOperation, StepState


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(locations.VARIABLE, str(tmp_path / "journal.db"))


def emptied(
    *moved: tuple[str, str], shut: tuple[str, ...] = (), stubborn: tuple[str, ...] = (),
    outcome: str = "completed",
) -> str:  # fmt: skip
    """An emptying of alpha: guests, and the hosts they left."""
    with jobs.open_journal() as journal:
        id_ = journal.begin(NewOperation(kind="evacuate", guest="alpha", source="alpha", detail={}))
        for guest, source in moved:
            part = journal.begin(
                NewOperation(kind="migrate", guest=guest, guest_uuid=f"u-{guest}", source=source,
                             target="gamma", detail={"part_of": id_})
            )  # fmt: skip
            journal.finish(part, outcome, {})
        for guest in (*shut, *stubborn):
            intent = {"uuid": f"u-{guest}", "guest": guest, "saved": False}
            step = journal.intend(id_, evacuation_progress.SHUT_DOWN, intent, None)
            done = StepState.DONE if guest in shut else StepState.FAILED
            journal.conclude(id_, step, done, None, None)
        journal.finish(id_, "completed", {"left": []})
    return id_


def back() -> tuple[set[str], set[str]]:
    """UUIDs of those that go back, and of those that are started."""
    task = evacuation.back_to("alpha", None)
    return {uuid for uuid, _ in task.goes}, set(task.start)


def test_who_only_made_room_elsewhere_is_not_brought() -> None:
    maintenance.enter("alpha", "")
    emptied(("a", "alpha"), ("b", "beta"))
    assert back() == ({"u-a"}, set())
    assert dict(evacuation.back_to("alpha", None).called) == {"u-a": "a", "u-b": "b"}


def test_all_that_left_since_the_maintenance_began_come_back_even_after_it_has_ended() -> None:
    emptied(("long-ago", "alpha"))
    maintenance.enter("alpha", "")
    emptied(("g1", "alpha"), shut=("off1",))
    emptied(("g2", "alpha"))
    everybody = ({"u-g1", "u-g2"}, {"u-off1"})
    assert back() == everybody
    maintenance.leave("alpha")  # the first thing that bringing them back does
    assert back() == everybody


def test_who_did_not_shut_down_in_time_may_have_later_and_is_started_then() -> None:
    maintenance.enter("alpha", "")
    id_ = emptied(("a", "alpha"), shut=("off1",), stubborn=("late",))
    assert back() == ({"u-a"}, {"u-off1", "u-late"})
    assert service.noted(id_, ()).shut == ("u-off1",)


def test_a_maintenance_after_it_hides_no_emptying() -> None:
    maintenance.enter("alpha", "")
    emptied(("a", "alpha"))
    maintenance.leave("alpha")
    maintenance.enter("alpha", "a disk is changed")
    maintenance.leave("alpha")
    assert back() == ({"u-a"}, set())


def test_what_was_moved_is_known_without_a_report() -> None:
    maintenance.enter("alpha", "")
    with jobs.open_journal() as journal:
        id_ = journal.begin(NewOperation(kind="evacuate", guest="alpha", source="alpha", detail={}))
        intent = {"guest": "off", "uuid": "u-off", "from": "alpha", "to": "beta"}
        journal.intend(id_, MOVE, intent, None)
        journal.finish(id_, "unknown", None)  # forgotten
    assert back() == ({"u-off"}, set())


def test_a_move_whose_end_nobody_knew_counts_unless_the_guest_was_left() -> None:
    id_ = emptied(("a", "alpha"), outcome="unknown")
    with jobs.open_journal() as journal:
        (part,) = journal.parts(id_, 0.0)
    found = arrived_of(part, set())
    assert found is not None
    assert found.uuid == "u-a"
    assert arrived_of(part, {"a"}) is None
    assert arrived_of(part, {"u-a"}) is None
