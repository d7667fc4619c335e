"""All operations of a journal, followed at once."""

import threading
import time
from pathlib import Path

from tests.support.happenings import WEB1, WEB2, journal, tell
from vmckpt.journal.follow import Follower, Happening
from vmckpt.journal.store import Journal

__all__ = ["journal"]


def names(found: list[Happening]) -> list[tuple[str, str]]:
    return [(one.operation.guest, one.kind) for one in found]


def test_each_look_brings_what_is_new_and_nothing_twice(journal: Journal) -> None:
    old = journal.begin(WEB1)
    tell(journal, old)
    time.sleep(0.01)
    follower = Follower(journal)
    assert follower.look() == []

    new = journal.begin(WEB2)
    tell(journal, old, at=0.5)
    assert sorted(names(follower.look())) == [
        ("web1", "decided"), ("web1", "phase-changed"), ("web2", "began"),
    ]  # fmt: skip
    assert follower.look() == []

    tell(journal, new)
    journal.finish(new, "failed", {"error": "no way"})
    journal.finish(old, "completed", {})
    found = follower.look()
    assert sorted(names(found)) == [
        ("web1", "ended"), ("web2", "decided"), ("web2", "ended"), ("web2", "phase-changed"),
    ]  # fmt: skip
    texts = {one.operation.guest: one.text for one in found if one.kind == "ended"}
    assert texts == {"web1": "migrate ended: completed", "web2": "migrate ended: failed: no way"}
    assert follower.look() == []


def test_one_that_begins_and_ends_between_two_looks_is_told_whole(journal: Journal) -> None:
    follower = Follower(journal)
    follower.look()
    id_ = journal.begin(WEB1)
    tell(journal, id_)
    journal.finish(id_, "cancelled", None)

    told = [kind for _, kind in names(follower.look())]
    assert (sorted(told), told[-1]) == (["began", "decided", "ended", "phase-changed"], "ended")


def test_it_goes_back_as_far_as_was_asked(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    journal.finish(id_, "completed", {})
    assert names(Follower(journal, journal.now() - 60).look()) == [
        ("web1", "began"), ("web1", "ended"),
    ]  # fmt: skip
    assert Follower(journal, journal.now() + 60).look() == []


def test_writers_side_by_side_lose_nothing(journal: Journal, place: Path | str) -> None:
    follower = Follower(journal)
    follower.look()

    def write() -> None:
        with Journal(place) as mine:
            for _ in range(5):
                id_ = mine.begin(WEB1)
                tell(mine, id_)
                mine.finish(id_, "completed", {})

    writers = [threading.Thread(target=write) for _ in range(3)]
    for one in writers:
        one.start()
    found: list[Happening] = []
    while any(one.is_alive() for one in writers):
        found += follower.look()
    found += follower.look()

    per_job: dict[str, list[str]] = {}
    for told in found:
        per_job.setdefault(told.operation.id, []).append(told.kind)
    assert len(per_job) == 15
    assert {tuple(sorted(kinds)) for kinds in per_job.values()} == {
        ("began", "decided", "ended", "phase-changed")
    }
