"""The hints of commands that need no guest are commands that help: each is run as it is printed."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import postgres
from tests.support.command_runs import Run, placed
from tests.support.following import take
from tests.support.recorded_jobs import WEB1
from tests.support.recording import until
from vmckpt import recovery
from vmckpt.errors import GuestLocked, LeaseLost
from vmckpt.journal import controller_identity, jobs
from vmckpt.journal.recorder import OrphanedJob
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.lease.controller_lease import guest_resource
from vmckpt.migration.recovery.steps import Step
from vmckpt.model.migration import Outcome
from vmckpt.model.recovery import Settled
from vmckpt.units import Seconds


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """A journal, and a host of libvirt's test driver with the running guest `test`."""
    placed(tmp_path, monkeypatch)
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


def test_a_request_without_an_answer_is_found_in_the_job(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(jobs.control.__kwdefaults__ or {}, "patience", Seconds(0.3))
    with Journal() as journal:
        id_ = journal.begin(WEB1)
        taker = threading.Timer(0.1, lambda: journal.take_requests(id_))
        taker.start()
        wrong = run.wrong("cancel", id_)
        taker.join()
        assert re.search(r"cancel.*not answered|cancel.*unknown|cancel", run.follow(wrong))


def test_a_job_with_a_live_controller_is_followed_to_its_end(run: Run) -> None:
    with Journal() as journal:
        id_ = journal.begin(WEB1)
        wrong = run.wrong("recover", "--forget", id_)
        end = threading.Timer(0.3, lambda: journal.finish(id_, "completed", {}))
        end.start()
        assert "completed" in run.follow(wrong)
        end.join()


def test_a_job_of_a_newer_version_is_recovered_by_that_version(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def settled(case: OrphanedJob, _: object) -> Settled:
        return case.ended(Settled(truth="all is well", outcome=Outcome.COMPLETED))

    with Journal() as journal:
        gone = replace(controller_identity.this_process(), started=1)
        id_ = journal.begin(replace(WEB1, kind="teleport"), controller=gone)
    code, told = run("recover")
    assert (code, id_ in told) == (13, True), told
    monkeypatch.setattr(recovery, "HANDLERS", {**recovery.HANDLERS, "teleport": settled})
    assert "all is well" in run.follow(told)


def test_a_record_whose_commit_was_lost_is_looked_for_among_the_jobs(
    run: Run, postgresql: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends the connection of a commit, which a trigger delays."""
    place = postgresql.place()
    schema = place.rpartition("%3D")[2]
    monkeypatch.setenv("VMCKPT_JOURNAL", place)
    assert run("jobs")[0] == 0  # makes the tables
    slow = (
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_sleep(60); RETURN NULL; END'",
        "CREATE CONSTRAINT TRIGGER slowly AFTER INSERT ON operations INITIALLY DEFERRED FOR EACH"
        " ROW EXECUTE FUNCTION slow()",
    )  # fmt: skip
    for one in slow:
        postgresql.sql(one, schema)
    kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
    killer = threading.Thread(target=lambda: until(lambda: postgresql.sql(kill) == "t", 60.0))
    killer.start()
    wrong = run.wrong("maintenance", "enter", "alpha")
    killer.join()
    assert "no running jobs found" in run.follow(wrong)  # so it was not recorded
    postgresql.sql("DROP TRIGGER slowly ON operations", schema)
    assert run("maintenance", "enter", "alpha")[0] == 0


def test_a_host_that_does_not_answer_is_examined(run: Run, tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(
        "hosts: {alpha: {uri: 'test:///default'}, beta: {uri: 'qemu+tcp://127.0.0.1:1/system'}}\n"
    )
    told = run("guests")[1]
    (doctor,) = take(next(line for line in told.splitlines() if "doctor" in line))
    code, told = run(*doctor.words[1:])
    assert (code != 0, "Connection refused" in told) == (True, True), told


@pytest.fixture
def journal(run: Run) -> Iterator[Journal]:
    """The journal of these commands."""
    with Journal() as made:
        yield made


TEST = replace(WEB1, guest="test", guest_uuid="6695eb01-f6a4-8304-79aa-97f2502e193f")
"""A migration of the guest of the test driver, which is running on alpha."""
EVACUATION = NewOperation(kind="evacuate", guest="alpha", source="alpha")


def orphaned(journal: Journal, what: NewOperation) -> str:
    """A job whose controller has ended."""
    controller = replace(controller_identity.this_process(), started=1)
    return journal.begin(what, controller=controller)


def outcome(journal: Journal, id_: str) -> str | None:
    return journal.operation(id_, ended=True).outcome


@contextmanager
def controlled(journal: Journal, id_: str, ok: bool, then: str | None) -> Iterator[None]:
    """A controller that answers each request to a job; `then`: the outcome with which it ends."""
    over = threading.Event()

    def control() -> None:
        while not over.wait(0.02):
            for request in journal.take_requests(id_):
                journal.answer(request.id, "it is not paused" if not ok else "cancelled", ok)
                if then is not None:
                    journal.finish(id_, then, None)

    thread = threading.Thread(target=control)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_guest_that_an_interrupted_job_holds_is_free_after_the_hint(
    run: Run, journal: Journal
) -> None:
    before = journal.begin(TEST)
    lease = guest_resource(TEST.guest_uuid or "")
    journal.acquire(before, lease)
    journal.leave(before)
    after = journal.begin(TEST)
    with pytest.raises(GuestLocked) as caught:
        journal.acquire(after, lease)
    run.follow(str(caught.value))
    assert outcome(journal, before) == "failed"
    journal.acquire(after, lease)


def test_a_guest_that_a_job_holds_is_free_after_the_job_was_cancelled_and_watched(
    run: Run, journal: Journal
) -> None:
    before = journal.begin(TEST)
    lease = guest_resource(TEST.guest_uuid or "")
    journal.acquire(before, lease)
    after = journal.begin(replace(TEST, kind="snapshot"))
    with pytest.raises(GuestLocked) as caught:
        journal.acquire(after, lease)
    watch, cancel, recover = take(str(caught.value))
    with controlled(journal, before, ok=True, then="cancelled"):
        run.good(*cancel.words[1:])
    assert "cancelled" in run.good(*watch.words[1:])
    journal.acquire(after, lease)
    journal.leave(after)
    run.good(*recover.words[1:])
    assert outcome(journal, after) is not None


def test_a_controller_that_lost_its_job_finds_its_outcome(run: Run, journal: Journal) -> None:
    id_ = journal.begin(TEST)
    fence = journal.acquire(id_, guest_resource(TEST.guest_uuid or ""))
    journal.finish(id_, "completed", None)
    with pytest.raises(LeaseLost) as caught:
        journal.intend(id_, "move", {}, fence)
    assert f"{id_} test: completed" in run.follow(str(caught.value))


def test_an_evacuation_that_refuses_to_resume_is_shown(run: Run, journal: Journal) -> None:
    id_ = journal.begin(EVACUATION)
    with controlled(journal, id_, ok=False, then=None):
        told = run.wrong("resume", id_)
    shown = run.follow(told)
    assert (id_ in shown, "it is not paused" in shown) == (True, True)


def test_a_job_that_loses_its_controller_while_it_is_watched_is_recovered(
    run: Run, journal: Journal
) -> None:
    id_ = orphaned(journal, WEB1)
    assert re.search(r"\btest\b", run.follow(run.wrong("watch", id_)))
    assert outcome(journal, id_) == "failed"


def test_a_request_to_an_orphaned_evacuation_is_replaced_by_its_recovery(
    run: Run, journal: Journal
) -> None:
    id_ = orphaned(journal, EVACUATION)
    run.follow(run.wrong("cancel", id_))
    assert outcome(journal, id_) == "failed"


def test_a_guest_whose_job_has_an_invalid_order_is_found_among_the_guests(
    run: Run, journal: Journal
) -> None:
    id_ = journal.begin(TEST)
    journal.intend(id_, Step.MOVE, {"order": {"to": 7}}, None)
    journal.leave(id_)
    assert re.search(r"\btest\b.*\balpha\b", run.follow(run.wrong("resume", id_)))
