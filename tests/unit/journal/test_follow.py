"""All operations of a journal, followed at once."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vmckpt.cli import events as command
from vmckpt.journal import location as locations
from vmckpt.journal.follow import Follower, Happening
from vmckpt.journal.records import Batch, NewOperation
from vmckpt.journal.serialization import as_record
from vmckpt.journal.store import Journal
from vmckpt.model.events import Decided, PhaseChanged
from vmckpt.model.migration import Decision, JobPhase
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", source="alpha", target="beta")
WEB2 = NewOperation(kind="migrate", guest="web2", source="alpha", target="gamma")


@pytest.fixture
def journal(place: Path | str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv(locations.VARIABLE, str(place))
    with Journal(place) as made:
        yield made


def tell(journal: Journal, id_: str, at: float = 0.0) -> None:
    decision = Decision(at=Seconds(at), action="wait", reason="it gets less", rule="grow")
    told = [PhaseChanged(phase=JobPhase.PRE_COPY), Decided(decision=decision)]
    batch = Batch(events=[as_record(one, Seconds(0.0), Seconds(at)) for one in told])
    journal.write(id_, batch)


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


def ran(*words: str) -> str:
    done = CliRunner().invoke(command.app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_tells_them_in_lines_or_objects(journal: Journal) -> None:
    mine, other = journal.begin(WEB1), journal.begin(WEB2)
    tell(journal, mine)
    journal.finish(mine, "completed", {})

    text = ran("--since", "1min")
    assert f"{mine} web1: decided wait, because it gets less" in text
    assert f"{mine} web1: migrate ended: completed" in text
    told = [json.loads(line) for line in ran("--since", "1min", "--json").splitlines()]
    assert {one["job"] for one in told} == {mine, other}
    assert [one["event"] for one in told if one["job"] == other] == ["began"]
    [decided] = [one for one in told if one["event"] == "decided"]
    assert (decided["guest"], decided["values"]["rule"]) == ("web1", "grow")
    for about in ("web2", "gamma", other):
        assert {json.loads(line)["job"] for line in ran(about, "--json").splitlines()} == {other}


def test_it_goes_on_until_it_is_interrupted(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks) == 2:
            raise KeyboardInterrupt
        journal.finish(journal.begin(WEB1), "completed", {})

    monkeypatch.setattr(time, "sleep", sleep)
    done = CliRunner().invoke(command.app, ["--follow", "--json"])

    assert done.exit_code == 130
    told = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert told == ["began", "ended"] * 2


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
