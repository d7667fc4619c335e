"""A protection that is watched: its agents' words, while the journal has it."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.support.protected_jobs import STANDS, WEB1, WORKS, agents, journal, protected
from tests.support.recorded_jobs import ran
from vmckpt.cli import output
from vmckpt.errors import OrphanedJobs
from vmckpt.journal import controller_identity
from vmckpt.journal.store import Journal

__all__ = ["journal"]


def test_it_is_watched_by_what_its_agents_say_until_the_guest_runs_on_the_backup(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    protected(journal)
    lines: list[str] = []
    monkeypatch.setattr(output, "say", lines.append)
    silent = {"error": "alpha: no answer", "unreachable": True}
    over = {**STANDS, "outcome": "failed-over", "why": "silent for 1.2 s"}
    agents(
        monkeypatch,
        lambda n: (WORKS, STANDS) if n < 4 else (silent, STANDS) if n < 8 else (silent, over),
    )

    told = ran("watch", "web1")

    assert len(lines) == 3
    assert (
        "protecting, epoch 7, 120 ms behind, pause 20 ms, interval 100 ms (as asked for: 100 ms),"
        " standby ready: it follows" in lines[0]
    )
    assert "unknown, standby ready: it follows, problem: alpha: no answer" in lines[1]
    assert "failed over; the guest is running on beta, unprotected" in told
    assert "run vmckpt recover; once alpha is up again, run vmckpt protect web1 --reverse" in told


def test_in_json_it_is_an_object_a_line_that_ends_with_what_the_journal_knows(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = protected(journal)

    def say(count: int) -> tuple[Any, Any]:
        if count == 5:
            journal.finish(id_, "completed", {"unprotected": True, "runs_on": "alpha"})
        return WORKS, STANDS

    agents(monkeypatch, say)
    first, last = [json.loads(line) for line in ran("watch", id_, "--json").splitlines()]

    assert (first["kind"], first["because"]) == ("stands", ["first"])
    assert (first["phase"], first["behind_s"], first["ready"]) == ("protecting", 0.12, True)
    assert (last["kind"], last["outcome"], last["job"]["job"]) == ("ended", "completed", id_)
    assert last["why"] == "the protection was ended; the guest is running on alpha"


def test_while_somebody_is_at_work_with_it_its_agents_are_not_asked(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is taken away looks like one that is lost."""
    id_ = journal.begin(WEB1)
    journal.update(id_, {"phase": "protecting"})
    lines: list[str] = []
    left = iter(range(3))

    def say(line: str) -> None:
        lines.append(line)
        journal.finish(id_, "completed", {"failed_over": "beta", "why": "asked for"})

    monkeypatch.setattr(output, "say", say)
    agents(monkeypatch, lambda _: (next(left), {}))

    assert "the guest is running on beta: asked for" in ran("watch", "web1")
    assert [line.split()[-4:] for line in lines] == [["is", "changing", "the", "protection"]]
    assert next(left) == 0


def test_one_whose_controller_died_before_it_was_ready_is_nobodys(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents(monkeypatch, lambda _: (WORKS, STANDS))
    journal.begin(WEB1, controller=replace(controller_identity.this_process(), started=1))

    with pytest.raises(OrphanedJobs, match="is orphaned"):
        ran("watch", "web1")
