"""The recorder as a controller's word that it lives, and what it does when another takes over."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.recording import sampled, until
from vmckpt.errors import GuestLocked, JournalError, LeaseLost, OrphanedJobs
from vmckpt.journal import controller_identity, jobs, recorder
from vmckpt.journal.jobs import Answer
from vmckpt.journal.recorder import Recorder
from vmckpt.journal.records import (
    ControllerIdentity,
    NewOperation,
    Operation,
    RequestKind,
    StepState,
)
from vmckpt.journal.store import Journal
from vmckpt.lease import controller_lease
from vmckpt.model.events import PhaseChanged
from vmckpt.model.migration import JobPhase
from vmckpt.units import Seconds

WEB1 = NewOperation(kind="migrate", guest="web1", guest_uuid="u-1", source="alpha", target="beta")
GUEST = "guest/u-1"
FAR = ControllerIdentity(host="far", boot="another", pid=7, started=9)
DEAD = replace(controller_identity.this_process(), started=1)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def journal(place: Path | str) -> Iterator[Journal]:
    with Journal(place) as made:
        yield made


@pytest.fixture
def recording(place: Path | str, warnings: list[str]) -> Iterator[Recorder]:
    with recorder.begin(WEB1, warnings.append, place) as made:
        yield made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats at every look."""
    monkeypatch.setattr(controller_lease, "HEARTBEAT", Seconds(0.0))


def taken_over(journal: Journal, id_: str, monkeypatch: pytest.MonkeyPatch) -> Operation:
    """As another machine does it, to which ours is dead."""
    found = journal.operation(id_)
    with monkeypatch.context() as patched:
        patched.setattr(controller_identity, "is_alive", lambda _: False)
        patched.setattr(controller_identity, "this_process", lambda: FAR)
        journal.take_over(found)
    return journal.operation(id_)


def test_a_recorder_says_that_its_controller_lives(
    quick: None, recording: Recorder, journal: Journal
) -> None:
    assert recording.id is not None
    first = journal.operation(recording.id).alive_until
    assert first is not None
    id_ = recording.id

    until(lambda: (journal.operation(id_).alive_until or 0.0) > first)
    assert recording.holds
    recording.check()


def test_after_its_end_an_operation_gives_no_word_any_more(
    quick: None, recording: Recorder, journal: Journal, warnings: list[str]
) -> None:
    assert recording.id is not None
    recording.acquire(GUEST)
    recording.finish("completed", None)
    id_ = recording.id
    until(lambda: not journal.operation(id_).active)
    ended = journal.operation(recording.id).alive_until
    time.sleep(1.2)

    assert journal.operation(recording.id).alive_until == ended
    assert warnings == []
    assert journal.acquire(journal.begin(WEB1), GUEST).token == 2


def test_steps_are_in_the_journal_when_the_call_returns(
    recording: Recorder, journal: Journal
) -> None:
    assert recording.id is not None
    fence = recording.acquire(GUEST)
    step = recording.intend("move", {"to": "beta"})
    assert [one.state for one in journal.steps(recording.id)] == [StepState.INTENDED]
    recording.conclude(step, StepState.DONE, {"ok": True})

    assert recording.fence == fence
    detail = jobs.job(journal, recording.id)
    assert [(one.name, one.state) for one in detail.steps] == [("move", "done")]
    assert detail.as_json()["steps"][0]["result"] == {"ok": True}


def test_a_busy_guest_leaves_the_recorder_as_it_was(recording: Recorder, journal: Journal) -> None:
    other = journal.begin(WEB1)
    journal.acquire(other, GUEST)

    with pytest.raises(GuestLocked, match=other):
        recording.acquire(GUEST)
    assert recording.fence is None
    recording.check()


@pytest.mark.parametrize("leased", [True, False])
def test_who_was_taken_over_hears_of_it_and_writes_nothing_more(
    quick: None,
    recording: Recorder,
    journal: Journal,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
    leased: bool,
) -> None:
    assert recording.id is not None
    id_ = recording.id
    if leased:
        recording.acquire(GUEST)
    taken_over(journal, id_, monkeypatch)
    until(lambda: not recording.holds)

    def acts() -> Iterator[Callable[[], object]]:
        yield recording.check
        yield lambda: recording.intend("move", {})
        yield lambda: recording.conclude(1, StepState.DONE)
        yield lambda: recording.acquire(GUEST)

    for act in acts():
        with pytest.raises(LeaseLost, match=f"vmckpt job {id_}"):
            act()
    recording.take(PhaseChanged(phase=JobPhase.SETUP))
    recording.take(sampled(time.monotonic()))
    recording.finish("completed", None)
    recording.close()
    assert journal.operation(id_).active
    written = (journal.events(id_), journal.samples(id_), journal.steps(id_))
    assert written == ([], [], [])
    assert len(warnings) == 1
    assert "another" in warnings[0] or "far" in warnings[0]


def test_an_intent_after_the_takeover_is_refused_before_any_heartbeat(
    recording: Recorder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recording.id is not None
    recording.acquire(GUEST)
    taken_over(journal, recording.id, monkeypatch)

    with pytest.raises(LeaseLost, match="process 7 on far has taken over the job"):
        recording.intend("move", {})
    assert not recording.holds
    assert journal.steps(recording.id) == []


def test_who_takes_over_goes_on_recording(
    place: Path | str, journal: Journal, warnings: list[str]
) -> None:
    id_ = journal.begin(WEB1, controller=DEAD)
    stale = journal.acquire(id_, GUEST)
    step = journal.intend(id_, "move", {}, stale)
    fence = journal.take_over(journal.operation(id_))
    with recorder.resumed(journal.operation(id_), fence, warnings.append, place) as made:
        assert made.holds
        made.conclude(step, StepState.UNDONE, {})
        made.take(PhaseChanged(phase=JobPhase.SETUP))
        made.finish("failed", None)
    found = journal.operation(id_)

    assert (found.outcome, found.phase) == ("failed", "setup")
    assert journal.steps(id_)[0].state == "undone"
    assert 0 <= journal.events(id_)[0].at < 60
    assert warnings == []


def test_what_somebody_else_took_over_since_is_not_resumed(
    place: Path | str, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = journal.begin(WEB1, controller=DEAD)
    fence = journal.take_over(journal.operation(id_))
    taken_over(journal, id_, monkeypatch)

    with pytest.raises(LeaseLost):
        recorder.resumed(journal.operation(id_), fence, pytest.fail, place)


def test_only_where_others_may_take_over_an_old_heartbeat_stops_the_controller(
    recording: Recorder, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(recorder, "boottime", lambda: Seconds(now + controller_lease.TTL))
    monkeypatch.setattr(recorder.Recorder, "_beat", lambda *_: None)

    assert recording.holds is not journal.shared
    recording.check()


def test_a_journal_that_does_not_answer_is_no_loss_yet(
    recording: Recorder, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise JournalError("no answer")

    monkeypatch.setattr(Journal, "heartbeat", broken)
    monkeypatch.setattr(controller_lease, "HEARTBEAT", Seconds(0.0))
    until(lambda: warnings)

    assert warnings == ["the journal may be incomplete: no answer"]
    assert recording.holds
    recording.check()


def aged(journal: Journal, id_: str, seconds: float) -> None:
    """The last word of an operation's controller is older than it was."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(controller_identity, "this_process", lambda: FAR)
        journal.heartbeat(id_, Seconds(-seconds))


def test_a_job_on_another_machine_is_unattended_once_it_is_not_heard_of(journal: Journal) -> None:
    id_ = journal.begin(WEB1, controller=FAR)
    [heard] = jobs.jobs(journal)
    aged(journal, id_, 1.0)
    [silent] = jobs.jobs(journal)

    assert (heard.attended, heard.unattended) == (True, False)
    assert (silent.attended, silent.doing) == (False, "unattended")


def test_a_controller_on_another_machine_is_asked_through_the_journal(journal: Journal) -> None:
    id_ = journal.begin(WEB1, controller=FAR)

    def controller(place: Path | str) -> None:
        with Journal(place) as theirs:
            while not (taken := theirs.take_requests(id_)):
                time.sleep(0.02)
            theirs.answer(taken[0].id, "it is set", ok=True)

    thread = threading.Thread(target=controller, args=(journal.place,))
    thread.start()
    answer = jobs.control(journal, id_, RequestKind.MAX_DOWNTIME, {"seconds": 0.5})
    thread.join()

    assert answer == Answer(ok=True, text="it is set")


def test_what_is_not_heard_of_is_done_directly(journal: Journal) -> None:
    id_ = journal.begin(WEB1, controller=FAR)
    aged(journal, id_, 1.0)

    answer = jobs.control(
        journal, id_, RequestKind.CANCEL, {}, lambda *_: Answer(ok=True, text="aborted")
    )
    assert answer.text == "aborted"
    with pytest.raises(OrphanedJobs, match="process 7 on far, has sent no heartbeat lately"):
        jobs.control(journal, id_, RequestKind.CANCEL, {})


def test_what_agents_go_on_with_stays_theirs_whatever_fails_meanwhile(
    journal: Journal, warnings: list[str]
) -> None:
    id_ = journal.begin(replace(WEB1, kind="protect"))
    journal.entrust(id_, "alpha")
    with (
        pytest.raises(JournalError),
        recorder.taken_over(journal, journal.operation(id_), warnings.append),
    ):
        raise JournalError("alpha cannot be asked")
    assert [one.id for one in journal.delegated_to_agents()] == [id_]
