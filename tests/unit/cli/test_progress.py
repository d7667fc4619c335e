"""What is seen of a whole host's moves while they are on their way."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.builders import sample
from vmckpt.cli import output, progress, watch
from vmckpt.cli.evacuate import Story
from vmckpt.cli.progress import Row
from vmckpt.journal import jobs
from vmckpt.journal.records import Batch, NewOperation
from vmckpt.journal.serialization import as_record
from vmckpt.journal.store import Journal
from vmckpt.model.events import Decided, Estimate, OnItsWay, Sampled
from vmckpt.model.migration import Decision
from vmckpt.units import Seconds

SAMPLED = Sampled(
    sample=sample(2.0), done=0.62,
    estimate=Estimate(low=Seconds(3.0), high=Seconds(5.0), converging=True),
)  # fmt: skip


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(output, "say", lines.append)
    return lines


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    with Journal() as made:
        yield made


def on_its_way(guest: str, sampled: Sampled | None = SAMPLED) -> OnItsWay:
    return OnItsWay(guest=guest, target="beta", sampled=sampled)


def test_a_log_says_now_and_then_how_far_each_guest_is(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY", 0.0)
    story = Story()
    for event in (on_its_way("web1"), on_its_way("db"), on_its_way("web1", None), on_its_way("db")):
        story.take(event)

    texts = [line.split("moving: ")[1] for line in said]
    one = "{} → beta 62% (3.0 s to 5.0 s)".format
    assert texts == [one("web1"), f"{one('web1')}, {one('db')}", one("db")]


def test_who_has_just_been_told_something_is_not_told_that_again(said: list[str]) -> None:
    story = Story()
    decision = Decision(at=Seconds(0.0), action="web1 → beta", reason="begins")
    story.take(Decided(decision=decision))
    story.take(on_its_way("web1"))

    assert len(said) == 1


def test_the_panel_of_many_long_names_fits_into_80_columns() -> None:
    screen = StringIO()
    console = Console(file=screen, width=80, color_system=None)
    rows = [Row(f"a-guest-with-a-long-name-{n}", "rack-2-host-17", SAMPLED) for n in range(14)]
    console.print(progress.rows_panel("evacuate alpha", "14 on their way", Seconds(7.0), rows))
    lines = screen.getvalue().splitlines()

    assert max(map(len, lines)) <= 80
    assert "and 4 more" in lines[-1]


def emptying(journal: Journal) -> str:
    """A job that empties a host: one guest is there, one on its way."""
    moves = [{"guest": "web1"}, {"guest": "db"}]
    new = NewOperation(kind="evacuate", guest="alpha", source="alpha", detail={"moves": moves})
    id_ = journal.begin(new, asked_by="eve@desk")
    for name in ("web1", "db"):
        part = NewOperation(
            kind="migrate", guest=name, source="alpha", target="beta", detail={"part_of": id_}
        )
        one = journal.begin(part, asked_by="eve@desk")
        if name == "web1":
            journal.finish(one, "completed", None)
        else:
            record = as_record(SAMPLED, Seconds(0.0), Seconds(0.0))
            journal.write(one, Batch(samples=[record]))
    return id_


def test_who_watches_sees_how_many_are_there_and_how_far_the_others_are(
    journal: Journal, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_EVERY", -1000.0)
    id_ = emptying(journal)
    watch.Window(terminal=False).take(jobs.Follower(journal, id_).look())

    assert said[-1].endswith("1 of 2 arrived; moving: db → beta 62% (3.0 s to 5.0 s)")


def test_the_panel_of_who_watches_names_the_host(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = emptying(journal)
    screen = StringIO()
    console = Console(file=screen, width=80, height=24, force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "err", console)
    window = watch.Window(terminal=True)
    window.take(jobs.Follower(journal, id_).look())
    console.print(window._panel())
    lines = screen.getvalue().splitlines()

    assert any(line.startswith(f"{id_} evacuate on alpha  1 of 2 arrived") for line in lines)
    assert any(line.startswith("db → beta") and "3.0 s to 5.0 s" in line for line in lines)
