"""The backup's agent: what it leaves word of when there is nothing to run beside, and its port."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.replicas import session
from vmckpt.agent.replication import backup, teardown, test_failover_files
from vmckpt.errors import GuestLocked
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.control_socket import Request, Requests
from vmckpt.replication.session import ProtectionOutcome
from vmckpt.replication.watchdog import process

SESSION = session(role="backup")


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Guests whose tests were taken away; no QEMU is here."""
    names: list[str] = []
    monkeypatch.setattr(identity, "hold", lambda _: None)
    monkeypatch.setattr(test_failover_files, "clear", lambda one: names.append(one.name))
    return names


def outcome(folder: Path) -> Any:
    return json.loads((folder / teardown.OUTCOME).read_text())["outcome"]


def test_a_standby_whose_qemu_is_gone_is_lost(tmp_path: Path, cleared: list[str]) -> None:
    backup.run_backup(SESSION, tmp_path, Requests())
    assert outcome(tmp_path) == ProtectionOutcome.LOST
    assert (tmp_path / process.OVER).exists()
    assert cleared == ["web1"]


def test_one_that_has_run_here_was_no_standby_any_more(tmp_path: Path, cleared: list[str]) -> None:
    del cleared
    standby_setup.note_run(tmp_path)
    backup.run_backup(SESSION, tmp_path, Requests())
    assert outcome(tmp_path) == ProtectionOutcome.FAILED_OVER


def test_what_was_said_of_its_end_before_stays(tmp_path: Path, cleared: list[str]) -> None:
    del cleared
    standby_setup.note_run(tmp_path)
    teardown.outcome(tmp_path, ProtectionOutcome.FAILED_OVER, "the primary was silent")
    said = (tmp_path / teardown.OUTCOME).read_text()
    backup.run_backup(SESSION, tmp_path, Requests())
    assert (tmp_path / teardown.OUTCOME).read_text() == said


def test_a_test_that_cannot_be_taken_away_is_in_nobodys_way(
    tmp_path: Path, cleared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise GuestLocked("it is busy")

    monkeypatch.setattr(test_failover_files, "clear", fails)
    backup.run_backup(SESSION, tmp_path, Requests())
    assert (cleared, outcome(tmp_path)) == ([], ProtectionOutcome.LOST)


def test_the_next_agent_listens_where_the_one_before_did(tmp_path: Path) -> None:
    with backup._listening(SESSION, tmp_path) as first:
        port = first.getsockname()[1]
    assert (tmp_path / backup.PORT).read_text() == str(port)
    with backup._listening(SESSION, tmp_path) as second:
        assert second.getsockname()[1] == port


def test_it_takes_only_wishes_that_a_backup_can_fulfil() -> None:
    class Told:
        def as_json(self) -> dict[str, Any]:
            return {}

    requests = Requests()
    told = cast("Any", Told())
    answers = backup._Answers(SESSION, told, requests, told)
    assert answers({"wish": "planned"}) == {
        "error": f"vmckpt's agent on {SESSION.host} does not support 'planned'"
    }
    assert not requests.any
    assert answers({"wish": "failover"})["peer"] == SESSION.peer
    assert requests.has(Request.FAILOVER)
