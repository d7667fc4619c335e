"""vmckpt jobs, job, set, postcopy, cancel and pause: what they show, ask and refuse."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.paths import ROOT
from tests.support.recorded_jobs import WEB1, app, dead, filled, journal, ran
from vmckpt.cli import jobs
from vmckpt.errors import BadInput, OrphanedJobs, ReadOnly
from vmckpt.journal import jobs as journal_jobs
from vmckpt.journal import recorder
from vmckpt.journal.jobs import Answer
from vmckpt.journal.store import Journal

__all__ = ["journal"]


def test_the_list_has_those_that_run_and_with_all_the_others_too(journal: Journal) -> None:
    past, now = dead(journal), filled(journal)
    journal.finish(past, "failed", None)

    assert [one["job"] for one in json.loads(ran("jobs", "--json"))] == [now]
    both = json.loads(ran("jobs", "--all", "--json"))
    assert [(one["job"], one["outcome"]) for one in both] == [(now, None), (past, "failed")]
    assert both[0]["controller"] == {**both[1]["controller"], "alive": True}
    assert both[1]["controller"]["alive"] is None
    assert both[0]["done"] == 0.25


def test_the_list_of_one_guest(journal: Journal) -> None:
    mine = filled(journal)
    other = journal.begin(replace(WEB1, guest="db1", guest_uuid="u-db1"), asked_by="eve@desk")
    for guest, ids in (("web1", [mine]), ("db1", [other]), ("u-db1", [other]), ("web", [])):
        assert [one["job"] for one in json.loads(ran("jobs", "--guest", guest, "--json"))] == ids


def test_the_list_fits_into_80_columns(journal: Journal) -> None:
    ids = [filled(journal), dead(journal)]
    journal.begin(replace(WEB1, guest="database-server-7"), asked_by="operator@control-room")
    console = Console(file=StringIO(), width=80)
    views = journal_jobs.jobs(journal)
    console.print(jobs.table(views, views[0].operation.began_at))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()

    assert max(map(len, lines)) <= 80
    whole = next(line for line in lines if line.startswith(ids[0]))
    for part in ("web1", "alpha → beta", "pre-copy", "25%", "eve@desk"):
        assert part in whole
    assert "unattended" in next(line for line in lines if line.startswith(ids[1]))


def test_one_job_is_told_with_its_decisions_and_requests(journal: Journal) -> None:
    id_ = filled(journal)
    journal.answer(journal.ask(id_, "pause", {}, "bob@desk"), "the guest stands still", ok=True)
    journal.finish(id_, "completed", {"total_ms": 4200, "warnings": ["beta: it is late"]})
    told = ran("job", id_)

    assert f"{id_} web1: completed, alpha → beta" in told
    assert "at 2.0 s: decided raise-downtime, because it stalls" in told
    assert "bob@desk requested pause: the guest stands still" in told
    assert "4.2 s" in told
    assert "total_ms=4000" in told
    assert "warning: beta: it is late" in told


def test_the_json_of_a_job_has_everything(journal: Journal) -> None:
    id_ = filled(journal)
    told = json.loads(ran("job", "web1", "--json"))

    assert (told["job"], told["phase"], told["report"]) == (id_, "pre-copy", None)
    assert (len(told["samples"]), len(told["events"]), told["requests"]) == (3, 2, [])
    assert told["forecast"]["total_ms"] == 4000


def test_an_unknown_job_is_bad_input(journal: Journal) -> None:
    filled(journal)

    for command in ("job", "watch", "cancel", "postcopy", "pause"):
        with pytest.raises(BadInput, match="did you mean web1"):
            ran(command, "web")


def test_names_are_shown_as_they_are(journal: Journal) -> None:
    journal.begin(replace(WEB1, guest="[red]web"))

    assert "[red]web" in ran("jobs")


def test_an_answer_is_what_the_controller_says(journal: Journal, tmp_path: Path) -> None:
    made = recorder.begin(WEB1, pytest.fail, place=tmp_path / "journal.db")
    seen: list[object] = []

    def engine() -> None:
        while len(seen) < 2:
            for request in made.take_requests():
                seen.append((request.kind, dict(request.arguments)))
                made.answer(request, ok=True, text=f"{request.kind} is set")
            time.sleep(0.05)

    thread = threading.Thread(target=engine)
    thread.start()
    told = ran("set", "web1", "--bandwidth", "unlimited", "--max-downtime", "500ms")
    thread.join()
    made.close()

    assert seen == [("bandwidth", {"bytes_per_second": None}), ("max-downtime", {"seconds": 0.5})]
    assert told == f"{made.id}: bandwidth is set\n{made.id}: max-downtime is set\n"


def test_a_refusal_is_an_error_that_says_why(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = filled(journal)
    monkeypatch.setattr(
        journal_jobs, "control", lambda *_: Answer(ok=False, text="not in pre-copy")
    )

    with pytest.raises(BadInput, match=f"{id_} refused postcopy: not in pre-copy"):
        ran("postcopy", id_)


@pytest.mark.parametrize(
    "args", [(), ("--bandwidth", "10KiB/s"), ("--bandwidth", "x"), ("--max-downtime", "0s")]
)
def test_a_setting_that_makes_no_sense_is_refused_before_it_is_asked(
    journal: Journal, args: tuple[str, ...]
) -> None:
    id_ = filled(journal)
    result = CliRunner().invoke(app, ["set", id_, *args])

    assert result.exit_code == 2
    assert journal.requests(id_) == []


@pytest.mark.parametrize("args", [("cancel",), ("postcopy",), ("pause",)])
def test_who_may_only_look_asks_nothing_of_a_job(
    journal: Journal, args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = filled(journal)
    monkeypatch.setenv("VMCKPT_READ_ONLY", "1")

    with pytest.raises(ReadOnly):
        ran(*args, id_)
    assert journal.requests(id_) == []


def test_a_job_that_has_ended_cannot_be_asked(journal: Journal) -> None:
    id_ = filled(journal)
    journal.finish(id_, "completed", None)

    with pytest.raises(BadInput, match="has ended: completed"):
        ran("cancel", id_)


def test_without_a_controller_the_error_names_the_command_that_does_it(journal: Journal) -> None:
    id_ = dead(journal)

    with pytest.raises(OrphanedJobs, match="on alpha, run virsh domjobabort web1"):
        ran("cancel", id_)
    with pytest.raises(OrphanedJobs, match="run virsh migrate-setspeed web1 100"):
        ran("set", id_, "--bandwidth", "100MiB/s")
    assert journal.requests(id_) == []


@pytest.mark.parametrize("command", ["jobs", "job", "watch", "set", "postcopy", "cancel", "pause"])
def test_the_help_has_an_example(command: str) -> None:
    assert f"vmckpt {command}" in ran(command, "--help")


def test_looking_at_jobs_costs_no_database_until_there_is_something_to_open() -> None:
    code = (
        "import vmckpt.cli.jobs, vmckpt.journal.recorder, sys; print('sqlalchemy' in sys.modules)"
    )
    seen = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip

    assert seen.stdout == "False\n"
