"""The recorder: it writes what it is told, and is never in the way."""

import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.recording import WEB1, sampled, until
from vmckpt.errors import JournalError
from vmckpt.journal import recorder
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import Request, StepState
from vmckpt.journal.store import Journal
from vmckpt.model.events import PhaseChanged
from vmckpt.model.migration import JobPhase
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import slowness


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def recording(path: Path, warnings: list[str]) -> Iterator[Recorder]:
    with recorder.begin(WEB1, warnings.append, place=path) as made:
        yield made


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal(path) as made:
        yield made


def test_all_that_is_told_is_in_the_journal_after_closing(
    recording: Recorder, journal: Journal, warnings: list[str]
) -> None:
    now = time.monotonic()
    for number in range(50):
        recording.take(sampled(now + number / 5, done=number / 50))
    recording.take(PhaseChanged(phase=JobPhase.PRE_COPY))
    recording.update(mode="precopy", guest_uuid="u-1")
    recording.forecast({"total_ms": 12.0})
    recording.finish("completed", {"total_ms": 10.0})
    recording.close()
    assert recording.id is not None
    found = journal.operation(recording.id)

    assert (found.phase, found.mode, found.guest_uuid) == ("pre-copy", "precopy", "u-1")
    assert (found.outcome, found.report) == ("completed", {"total_ms": 10.0})
    assert len(journal.samples(recording.id)) == 50
    assert [one.kind for one in journal.events(recording.id)] == ["phase-changed"]
    assert journal.forecast(recording.id) is not None
    assert warnings == []


def test_a_phase_is_in_the_journal_at_once(
    recording: Recorder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "INTERVAL", Seconds(60.0))
    time.sleep(0.6)  # the wait that is under way ends
    recording.take(PhaseChanged(phase=JobPhase.SETUP))
    assert recording.id is not None
    id_ = recording.id

    until(lambda: journal.operation(id_).phase == "setup", limit=5.0)


def test_requests_from_outside_are_taken_and_answered(
    recording: Recorder, journal: Journal
) -> None:
    assert recording.id is not None
    number = journal.ask(recording.id, "max-downtime", {"seconds": 0.5}, "eve@desk")
    taken: list[Request] = []
    until(lambda: taken or taken.extend(recording.take_requests()))  # type: ignore[func-returns-value]
    recording.answer(taken[0], ok=True, text="0.5 s from now on")
    until(lambda: journal.request(number).ok)

    assert [(one.kind, one.arguments) for one in taken] == [("max-downtime", {"seconds": 0.5})]
    assert journal.request(number).answer == "0.5 s from now on"
    assert recording.take_requests() == []


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null/journal.db"])
def test_an_operation_does_not_begin_unless_that_is_written(
    place: str, warnings: list[str]
) -> None:
    with pytest.raises(JournalError, match=f"journal {place}"):
        recorder.begin(WEB1, warnings.append, place=Path(place))
    assert warnings == []


def test_without_a_journal_there_is_one_warning_and_nothing_else(warnings: list[str]) -> None:
    made = recorder.begin(WEB1, warnings.append, place="none")
    made.take(PhaseChanged(phase=JobPhase.SETUP))
    made.take(sampled(1.0))
    made.update(mode="precopy")
    assert made.acquire("guest/u-1") is None
    assert [made.intend("move", {}), made.intend("move", {})] == [1, 2]
    made.conclude(1, StepState.DONE)
    made.check()
    assert made.holds
    made.finish("completed", {})
    made.close()

    assert (made.id, made.fence) == (None, None)
    assert made.take_requests() == []
    assert warnings == [
        "the journal is turned off: nothing is recorded, and other controllers are not locked out"
    ]


def test_a_locked_journal_makes_one_warning_and_what_waited_is_written_later(
    path: Path, journal: Journal, warnings: list[str]
) -> None:
    id_ = journal.begin(WEB1)
    made = Recorder(Journal(path, busy=Seconds(0.05)), id_, warnings.append)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    for _ in range(20):
        made.take(PhaseChanged(phase=JobPhase.SETUP))
        made.take(sampled(time.monotonic()))
    assert time.monotonic() - began < 0.5 * slowness()
    until(lambda: warnings)
    time.sleep(0.7)  # it fails once more
    holder.execute("ROLLBACK")
    holder.close()
    made.close()

    assert len(warnings) == 1
    assert "locked" in warnings[0]
    assert len(journal.events(id_)) == len(journal.samples(id_)) == 20


def test_what_waits_for_a_locked_journal_has_a_bound(
    path: Path, journal: Journal, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_MOST_SAMPLES", 10)
    id_ = journal.begin(WEB1)
    made = Recorder(Journal(path, busy=Seconds(0.01)), id_, warnings.append)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    for number in range(60):
        made.take(sampled(time.monotonic(), done=number / 60))
        made.take(PhaseChanged(phase=JobPhase.SETUP))
        time.sleep(0.002)
    until(lambda: warnings)
    holder.execute("ROLLBACK")
    holder.close()
    made.close()

    kept = journal.samples(id_)
    assert 10 <= len(kept) < 40
    assert kept[-1].done == 59 / 60
    assert len(journal.events(id_)) == 60


def test_a_fault_in_the_writer_itself_is_a_warning(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("never thought of")

    monkeypatch.setattr(Journal, "write", broken)
    made = recorder.begin(WEB1, warnings.append, place=path)
    made.take(PhaseChanged(phase=JobPhase.SETUP))
    until(lambda: warnings)
    made.close()

    assert warnings == ["the journal may be incomplete: never thought of"]


FULL_DISK = """
import resource, sys, time
from pathlib import Path
from tests.support.recording import WEB1, sampled
from vmckpt.journal import recorder
from vmckpt.journal.store import Journal

warnings = []
path = Path(sys.argv[1])
made = recorder.begin(WEB1, warnings.append, place=path)
made.take(sampled(time.monotonic()))
time.sleep(0.7)
used = max(one.stat().st_size for one in path.parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (used + 8192, resource.RLIM_INFINITY))
for _ in range(20):
    for _ in range(50):
        made.take(sampled(time.monotonic()))
    time.sleep(0.1)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
made.finish("completed", None)
made.close()
print(made.id, len(warnings))
"""


def test_a_full_disk_makes_one_warning_and_when_there_is_room_again_nothing_is_missing(
    path: Path, journal: Journal
) -> None:
    root = ROOT
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)],
        cwd=root, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert ran.stderr == ""
    id_, warned = ran.stdout.split()
    assert warned == "1"
    assert len(journal.samples(id_)) == 1001
    assert journal.operation(id_).outcome == "completed"


def test_taking_an_event_costs_microseconds(recording: Recorder) -> None:
    event = sampled(time.monotonic())
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_utime
    for _ in range(1000):
        recording.take(event)
    spent = resource.getrusage(resource.RUSAGE_THREAD).ru_utime - before

    assert spent < 0.1


def test_a_journal_that_fails_at_the_beginning_is_closed_and_told(
    path: Path, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> str:
        raise JournalError("database or disk is full")

    monkeypatch.setattr(Journal, "begin", full)
    with pytest.raises(JournalError, match="disk is full"):
        recorder.begin(WEB1, warnings.append, place=path)
    assert warnings == []
