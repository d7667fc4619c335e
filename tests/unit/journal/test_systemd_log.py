"""What journald receives of operations, on a real socket."""

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.recording import WEB1
from vmckpt import inventory
from vmckpt.app import migration
from vmckpt.errors import JournalError
from vmckpt.journal import controller_identity, maintenance, recorder, systemd_log
from vmckpt.journal.records import NewOperation, StepState
from vmckpt.journal.store import Journal
from vmckpt.journal.systemd_log import BEGAN, ENDED, EVENT, SystemdLog, encoded
from vmckpt.model.events import PhaseChanged
from vmckpt.model.migration import JobPhase, Outcome

Entry = dict[str, str]


def parsed(data: bytes) -> Entry:
    """Read an entry as journald does: NAME=value, or NAME, the value's length and the value."""
    found: Entry = {}
    while data:
        line, _, rest = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, rest = rest[8 : 8 + size], rest[8 + size :]
            assert rest[:1] == b"\n"
            rest = rest[1:]
        assert name.decode() not in found
        found[name.decode()] = value.decode()
        data = rest
    return found


class Journald:
    """A socket like journald's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.files = 0

    def taken(self) -> list[Entry]:
        """All entries, except those of the audit trail."""
        return [one for one in self.all() if one["MESSAGE_ID"] != systemd_log.AUDITED]

    def all(self) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            try:
                data, files, _, _ = socket.recv_fds(self.socket, 1 << 20, 1)
            except BlockingIOError:
                return entries
            for file in files:
                assert data == b""
                self.files += 1
                with pytest.raises(PermissionError):  # it is sealed
                    os.pwrite(file, b"x", 0)
                data = os.pread(file, os.fstat(file).st_size, 0)
                os.close(file)
            entries.append(parsed(data))


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journald]:
    made = Journald(tmp_path / "socket")
    monkeypatch.setenv(systemd_log.VARIABLE, str(made.path))
    yield made
    made.socket.close()


def test_a_migration_is_logged_with_its_fields(journald: Journald, tmp_path: Path) -> None:
    with recorder.begin(WEB1, print, place=tmp_path / "journal.db") as recording:
        recording.update(guest_uuid="u-1", policy="balanced", state="running")
        recording.take(PhaseChanged(phase=JobPhase.PRE_COPY))
        recording.finish(Outcome.COMPLETED, {"total_ms": 10.0})
        job = recording.id

    began, phase, ended = journald.taken()
    about = {
        "SYSLOG_IDENTIFIER": "vmckpt", "VMCKPT_JOB": job, "VMCKPT_KIND": "migrate",
        "VMCKPT_GUEST": "web1", "VMCKPT_SOURCE": "alpha", "VMCKPT_TARGET": "beta",
    }  # fmt: skip
    later = {**about, "VMCKPT_GUEST_UUID": "u-1", "VMCKPT_POLICY": "balanced"}
    title = f"{job}: migrate of web1 from alpha to beta"
    assert began.pop("MESSAGE").startswith(f"{title} began, requested by ")
    assert began == {**about, "MESSAGE_ID": BEGAN, "PRIORITY": "6", "VMCKPT_EVENT": "began"}
    assert phase == {
        **later, "MESSAGE": f"{title}: phase=pre-copy", "MESSAGE_ID": EVENT, "PRIORITY": "6",
        "VMCKPT_EVENT": "phase-changed",
    }  # fmt: skip
    assert ended == {
        **later, "MESSAGE": f"{title} ended: completed", "MESSAGE_ID": ENDED, "PRIORITY": "6",
        "VMCKPT_EVENT": "ended", "VMCKPT_OUTCOME": "completed",
    }  # fmt: skip


def test_a_new_controller_is_logged(journald: Journald, tmp_path: Path) -> None:
    place = tmp_path / "journal.db"
    with recorder.begin(WEB1, print, place=place):
        pass
    with Journal(place) as journal:
        (operation,) = journal.operations(active=True)
        with recorder.taken_over(journal, operation, print) as kept:
            kept.finish(Outcome.CANCELLED, None)

    events = [(one["VMCKPT_EVENT"], one["PRIORITY"]) for one in journald.taken()]
    assert events == [("began", "6"), ("taken-over", "5"), ("ended", "5")]


@pytest.mark.parametrize(
    ("outcome", "priority"),
    [
        (Outcome.COMPLETED, "6"), (Outcome.CANCELLED, "5"), (Outcome.FAILED, "3"),
        (Outcome.SHUT_OFF, "3"), (Outcome.LOST, "2"), ("unknown", "2"),
        ("an outcome of a newer version", "3"),
    ],
)  # fmt: skip
def test_the_outcome_determines_the_priority(
    journald: Journald, outcome: str, priority: str
) -> None:
    SystemdLog("m-1", WEB1).ended(outcome, {"error": "no route\nPRIORITY=7"})
    (entry,) = journald.taken()
    assert entry["PRIORITY"] == priority
    assert entry["VMCKPT_OUTCOME"] == outcome
    # A line break in a value adds no field.
    assert entry["MESSAGE"].endswith(f"ended: {outcome}: no route\nPRIORITY=7")


def test_an_operation_on_a_host_has_no_guest(
    journald: Journald, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", str(tmp_path / "journal.db"))
    maintenance.enter("alpha", "new memory")
    maintenance.leave("alpha")

    began, ended = journald.taken()
    assert began["MESSAGE"].split(",")[0].endswith(": maintenance of alpha began")
    assert (ended["MESSAGE_ID"], ended["PRIORITY"]) == (ENDED, "6")
    for one in (began, ended):
        assert "VMCKPT_GUEST" not in one
        assert (one["VMCKPT_SOURCE"], one["VMCKPT_KIND"]) == ("alpha", "maintenance")


def test_a_job_that_an_operator_closes_is_logged(
    journald: Journald, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_JOURNAL", str(tmp_path / "journal.db"))
    dead = replace(controller_identity.this_process(), pid=1, started=1)
    with Journal() as journal:
        job = journal.begin(WEB1, controller=dead)
    migration.forget(lambda: inventory.parse("hosts: {a: {uri: 'test:///default'}}", tmp_path), job)

    (ended,) = journald.taken()
    assert (ended["VMCKPT_JOB"], ended["VMCKPT_OUTCOME"]) == (job, "unknown")


def test_an_entry_that_exceeds_a_datagram_arrives_in_a_sealed_file(journald: Journald) -> None:
    error = "a long error " * 100_000
    SystemdLog("m-1", WEB1).ended(Outcome.FAILED, {"error": error})
    (entry,) = journald.taken()
    assert entry["MESSAGE"].endswith(error)
    assert journald.files == 1


def test_a_socket_that_accepts_nothing_delays_nothing(journald: Journald) -> None:
    log = SystemdLog("m-1", WEB1)
    for _ in range(5000):  # far more than the kernel queues
        log.began("root@ctl")
    assert 0 < len(journald.taken()) < 5000
    log.ended(Outcome.COMPLETED, None)
    assert [one["VMCKPT_EVENT"] for one in journald.taken()] == ["ended"]


@pytest.mark.parametrize("place", ["none", "/nowhere/socket", "/dev/null", "x" * 200])
def test_without_journald_nothing_happens(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(systemd_log.VARIABLE, place)
    SystemdLog("m-1", WEB1).ended(Outcome.COMPLETED, None)


def test_names_that_are_not_text_are_logged(journald: Journald) -> None:
    odd = NewOperation(kind="snapshot", guest="a\udcff=\n\x00b", source="alpha")
    SystemdLog("s-1", odd).began("root@ctl")
    (entry,) = journald.taken()
    assert entry["VMCKPT_GUEST"] == "a?=\n\x00b"
    assert entry["MESSAGE"].startswith("s-1: snapshot of a?=\n\x00b on alpha began")


def test_an_entry_has_the_form_of_the_protocol() -> None:
    assert encoded({"A": "1=2", "B": "x\ny"}) == b"A=1=2\nB\n\3\0\0\0\0\0\0\0x\ny\n"


def test_the_page_lists_the_ids() -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    assert [one for one in (BEGAN, EVENT, ENDED) if f"`{one}`" not in page] == []


def test_each_head_of_the_audit_trail_is_logged(journald: Journald, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        job = journal.begin(WEB1)
        journal.finish(job, Outcome.COMPLETED, None)
        trail = journal.audit()
    began, ended = journald.all()
    assert [one["VMCKPT_AUDIT_HEAD"] for one in (began, ended)] == [one.digest for one in trail]
    assert (ended["VMCKPT_AUDIT_SEQ"], ended["VMCKPT_EVENT"], ended["PRIORITY"]) == (
        "2", "audited", "7",
    )  # fmt: skip
    assert (ended["VMCKPT_JOB"], ended["VMCKPT_GUEST"]) == (job, "web1")
    assert f"{job} ended completed; head {trail[-1].digest}" in ended["MESSAGE"]


def test_the_head_of_a_transaction_that_failed_is_not_logged(
    journald: Journald, tmp_path: Path
) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        job = journal.begin(WEB1)
        with pytest.raises(JournalError, match="has no step 9"):
            journal.conclude(job, 9, StepState.DONE, None, None)
    assert [one["VMCKPT_AUDIT_SEQ"] for one in journald.all()] == ["1"]
