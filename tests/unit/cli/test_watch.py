"""A protection that is watched, listed or shown: its agents' words, while the journal has it."""

import json
import os
import signal
import subprocess
import sys
import threading
from io import StringIO

import pytest
from rich.console import Console

from tests.support.recorded_jobs import dead, filled, journal, ran, sampled
from vmckpt.cli import output
from vmckpt.cli import watch as cli_watch
from vmckpt.errors import OrphanedJobs
from vmckpt.journal import jobs as journal_jobs
from vmckpt.journal.records import Batch
from vmckpt.journal.serialization import as_record
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

__all__ = ["journal"]


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

    with pytest.raises(OrphanedJobs, match="is orphaned"):
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
    assert said.splitlines()[-1] == f"stopped watching; {id_} continues"
    assert journal.operation(id_).active
