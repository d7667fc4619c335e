"""Jobs of other terminals: looked at, followed, and asked for something."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.support.builders import sample
from tests.support.paths import ROOT
from vmckpt.cli import app as cli_app
from vmckpt.cli import jobs, output
from vmckpt.cli import watch as cli_watch
from vmckpt.errors import BadInput, OrphanedJobs, OutcomeUnknown, ReadOnly, VmckptError
from vmckpt.journal import controller_identity, recorder
from vmckpt.journal import jobs as journal_jobs
from vmckpt.journal.jobs import Answer
from vmckpt.journal.records import Batch, NewOperation, Operation, RequestKind
from vmckpt.journal.serialization import as_record
from vmckpt.journal.store import Journal
from vmckpt.model.events import Decided, Estimate, PhaseChanged, Sampled
from vmckpt.model.migration import Decision, JobPhase
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", source="alpha", target="beta")
SHORT = Seconds(0.3)

app = cli_app.app


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journal]:
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path))
    with Journal() as made:
        yield made


def sampled(at: float, done: float = 0.25) -> Sampled:
    estimate = Estimate(low=Seconds(3.0), high=Seconds(5.0), converging=True)
    return Sampled(sample=sample(at), estimate=estimate, done=done)


def filled(journal: Journal) -> str:
    """A job that runs, with something of everything."""
    id_ = journal.begin(WEB1, asked_by="eve@desk")
    decision = Decision(at=Seconds(2.0), action="raise-downtime", reason="it stalls")
    told = [PhaseChanged(phase=JobPhase.PRE_COPY), Decided(decision=decision)]
    journal.write(
        id_,
        Batch(
            changes={"phase": "pre-copy"},
            events=[as_record(one, Seconds(0.0), Seconds(1.0)) for one in told],
            samples=[as_record(sampled(at), Seconds(0.0), Seconds(0.0)) for at in (1.0, 1.2, 2.4)],
        ),
    )
    journal.add_forecast(id_, {"total_ms": 4000})
    return id_


def dead(journal: Journal) -> str:
    """A job whose controller has ended."""
    controller = replace(controller_identity.this_process(), started=1)
    return journal.begin(WEB1, controller=controller)


def ran(*args: str) -> str:
    """What a command says on stdout; its error is raised."""
    result = CliRunner().invoke(app, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_a_job_whose_controller_is_dead_is_unattended(journal: Journal) -> None:
    alive, lost = filled(journal), dead(journal)
    views = {view.operation.id: view for view in journal_jobs.jobs(journal)}

    assert (views[alive].unattended, views[alive].doing) == (False, "pre-copy")
    assert (views[lost].unattended, views[lost].doing) == (True, "unattended")


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
    assert "bob@desk asked for pause: the guest stands still" in told
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


def test_without_a_controller_somebody_else_may_do_it(journal: Journal) -> None:
    id_ = dead(journal)
    seen: list[object] = []

    def direct(operation: Operation, kind: RequestKind, arguments: object) -> Answer:
        seen.append((operation.id, kind, arguments))
        return Answer(ok=True, text="aborted by libvirt")

    answer = journal_jobs.control(journal, "web1", RequestKind.CANCEL, {}, direct)

    assert answer.text == "aborted by libvirt"
    assert seen == [(id_, RequestKind.CANCEL, {})]


def test_a_request_that_nobody_takes_is_withdrawn(journal: Journal) -> None:
    id_ = filled(journal)

    with pytest.raises(OrphanedJobs, match="withdrawn and nothing was done"):
        journal_jobs.control(journal, id_, RequestKind.CANCEL, {}, patience=SHORT)
    assert journal.take_requests(id_) == []


def test_a_request_that_is_taken_and_not_answered_may_be_done(journal: Journal) -> None:
    id_ = filled(journal)
    taker = threading.Timer(0.1, lambda: journal.take_requests(id_))
    taker.start()

    with pytest.raises(OutcomeUnknown, match="may or may not be done"):
        journal_jobs.control(journal, id_, RequestKind.CANCEL, {}, patience=SHORT)
    taker.join()


def test_an_end_while_waiting_is_an_answer(journal: Journal) -> None:
    id_ = filled(journal)
    end = threading.Timer(0.1, lambda: journal.finish(id_, "completed", None))
    end.start()
    answer = journal_jobs.control(journal, id_, RequestKind.POSTCOPY, {})
    end.join()

    assert answer == Answer(ok=False, text=f"{id_} has ended: completed")


def test_watching_ends_with_the_job_and_says_how_it_ended(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = filled(journal)
    lines: list[str] = []
    monkeypatch.setattr(output, "say", lines.append)
    monkeypatch.setattr(cli_watch, "_LOOK_EVERY", 0.05)

    def rest() -> None:
        record = as_record(sampled(4.0, done=0.9), Seconds(0.0), Seconds(0.0))
        journal.write(id_, Batch(samples=[record]))
        journal.finish(id_, "cancelled", None)

    end = threading.Timer(0.3, rest)
    end.start()
    told = ran("watch", id_)
    end.join()

    assert f"{id_} web1: cancelled after" in told
    assert lines[0] == "    1.0s phase=pre-copy"
    assert lines[1] == "    2.0s decided raise-downtime, because it stalls"
    assert [line[:8] for line in lines[2:]] == ["    2.4s", "    4.0s"]


def test_watching_in_json_is_an_object_a_line_from_the_beginning_to_the_end(
    journal: Journal,
) -> None:
    id_ = filled(journal)
    journal.finish(id_, "completed", None)
    lines = [json.loads(line) for line in ran("watch", id_, "--json").splitlines()]

    assert [line["kind"] for line in lines] == [
        "phase-changed", "sampled", "sampled", "decided", "sampled", "ended",
    ]  # fmt: skip
    assert lines[-1]["outcome"] == "completed"


def test_watching_a_job_that_nobody_attends_ends_with_an_error(journal: Journal) -> None:
    dead(journal)

    with pytest.raises(OrphanedJobs, match="nobody attends"):
        ran("watch", "web1")


def test_the_panel_fits_into_80_columns(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = filled(journal)
    screen = StringIO()
    console = Console(file=screen, width=80, height=24, force_terminal=True, color_system=None)
    monkeypatch.setattr(output, "err", console)
    window = cli_watch.Window(terminal=True)
    window.take(journal_jobs.Follower(journal, id_).look())
    console.print(window._panel())
    lines = screen.getvalue().splitlines()

    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"{id_} web1 → beta  pre-copy") for line in lines)
    assert any("time left" in line and "3.0 s to 5.0 s" in line for line in lines)


WATCH = """
import sys
from vmckpt.cli import app
sys.exit(app.run(["watch", "web1"]))
"""


def test_ctrl_c_ends_the_watching_alone(journal: Journal) -> None:
    id_ = filled(journal)
    watch = subprocess.Popen(
        [sys.executable, "-c", WATCH], env=dict(os.environ), text=True, stderr=subprocess.PIPE
    )
    assert watch.stderr is not None
    watch.stderr.readline()  # it watches
    watch.send_signal(signal.SIGINT)
    _, said = watch.communicate(timeout=30)

    assert watch.returncode == 130
    assert said.splitlines()[-1] == f"no longer watched; {id_} goes on"
    assert journal.operation(id_).active


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


def test_every_error_of_the_desk_has_an_exit_code_of_its_own_kind() -> None:
    codes = {kind: kind.exit_code for kind in (BadInput, OutcomeUnknown, OrphanedJobs)}

    assert len(set(codes.values())) == len(codes)
    assert all(issubclass(kind, VmckptError) for kind in codes)
