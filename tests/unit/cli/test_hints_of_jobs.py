"""The hints of commands that need no guest are commands that help: each is run as it is printed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.following import take
from tests.support.recorded_jobs import WEB1
from vmckpt.cli import app
from vmckpt.journal.store import Journal


class Run:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """Return the exit code and all that was printed."""
        self._capsys.readouterr()
        code = app.run(list(words))
        told = self._capsys.readouterr()
        return code, told.out + told.err

    def wrong(self, *words: str) -> str:
        """Run a command that must fail; its message."""
        code, told = self(*words)
        assert code, told
        return told

    def follow(self, message: str, **values: str) -> str:
        """Run the commands of the hint in a message; what they printed."""
        printed = ""
        for one in take(message, **values):
            assert one.words[0] == "vmckpt"
            code, told = self(*one.words[1:])
            assert code == 0, told
            printed += told
        return printed


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A journal, and a host of libvirt's test driver with the running guest `test`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.yaml").write_text("hosts: {alpha: {uri: 'test:///default'}}\n")
    monkeypatch.setenv("VMCKPT_INVENTORY", str(tmp_path / "hosts.yaml"))
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    return Run(capsys)


@pytest.fixture
def ended(run: Run) -> Iterator[str]:
    """A migration of web1 that has ended."""
    with Journal() as journal:
        id_ = journal.begin(WEB1)
        journal.finish(id_, "failed", {"total_ms": 10, "warnings": []})
        yield id_


def test_a_job_that_has_ended_is_shown(run: Run, ended: str) -> None:
    assert "failed" in run.follow(run.wrong("cancel", ended))


def test_a_guest_without_a_job_has_a_last_one(run: Run, ended: str) -> None:
    assert f"{ended} web1: failed" in run.follow(run.wrong("cancel", "web1"))


def test_an_unknown_job_is_found_among_all(run: Run, ended: str) -> None:
    assert ended in run.follow(run.wrong("job", "x-0000"))


def test_without_running_jobs_there_are_past_ones(run: Run, ended: str) -> None:
    assert ended in run.follow(run("jobs")[1])


def test_a_host_that_is_not_in_maintenance_is_not_in_the_list(run: Run) -> None:
    assert "alpha" not in run.follow(run.wrong("maintenance", "leave", "alpha"))


def test_a_maintenance_ends_with_the_command_that_cancel_names(run: Run) -> None:
    assert run("maintenance", "enter", "alpha")[0] == 0
    run.follow(run.wrong("cancel", "alpha"))
    assert json.loads(run("maintenance", "list", "--json")[1]) == []


def test_a_dashboard_without_a_terminal_is_a_list_of_jobs(run: Run, ended: str) -> None:
    assert json.loads(run.follow(run.wrong("dashboard"))) == []


def test_a_command_without_a_schema_is_not_among_those_that_have_one(run: Run) -> None:
    listed = run.follow(run.wrong("schema", "nothing"))
    assert ("jobs" in listed, "nothing" in listed) == (True, False)


def test_a_guest_that_is_not_there_is_not_among_the_guests(run: Run) -> None:
    listed = run.follow(run.wrong("label", "wrong", "a=b"))
    assert re.search(r"\btest\b", listed)


def test_a_guest_that_is_not_protected_is_not_in_the_status(run: Run) -> None:
    assert "test" not in run.follow(run.wrong("unprotect", "test"))
