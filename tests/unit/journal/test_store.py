"""What is written to the journal, and how it is found again."""

import time
from pathlib import Path

import pytest

from tests.support.journals import WEB1, Clock, sampled
from vmckpt.errors import BadInput, JournalError
from vmckpt.journal import controller_identity, store
from vmckpt.journal.records import Batch, Record, State
from vmckpt.journal.store import Journal
from vmckpt.lease import controller_lease
from vmckpt.units import Seconds


def test_an_operation_is_read_as_it_was_written(journal: Journal, clock: Clock) -> None:
    id_ = journal.begin(WEB1, asked_by="eve@desk", asked_from="10.0.0.7")
    journal.update(id_, {"phase": "pre-copy", "mode": "hybrid"})
    found = journal.operation(id_)

    assert (found.guest, found.source, found.target) == ("web1", "alpha", "beta")
    assert (found.state, found.phase, found.mode) == (State.RUNNING, "pre-copy", "hybrid")
    assert (found.asked_by, found.asked_from) == ("eve@desk", "10.0.0.7")
    assert (found.began_at, found.ended_at, found.active) == (clock.now, None, True)
    assert found.controller == controller_identity.this_process()


def test_an_end_is_written_once_and_the_report_without_its_samples(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    journal.finish(id_, "completed", {"total_ms": 3, "samples": [1, 2, 3]})
    journal.finish(id_, "failed", None)
    found = journal.operation(id_)

    assert (found.state, found.outcome) == (State.ENDED, "completed")
    assert found.report == {"total_ms": 3}


def test_events_and_samples_are_numbered_and_read_from_any_number_on(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    journal.add_samples(id_, sampled(0.0, 0.2))
    journal.add_samples(id_, sampled(0.4))
    journal.add_event(id_, Record(kind="decided", at=Seconds(0.3), values={"action": "abort"}))

    assert [(one.seq, one.at) for one in journal.samples(id_)] == [(1, 0.0), (2, 0.2), (3, 0.4)]
    assert [one.seq for one in journal.samples(id_, after=2)] == [3]
    assert journal.events(id_)[0].as_json() == {
        "at_ms": 300.0,
        "kind": "decided",
        "action": "abort",
    }
    last = journal.last_samples([id_]).get(id_)
    assert last is not None
    assert last.seq == 3


def test_times_are_the_databases_own(place: Path | str) -> None:
    before = time.time()
    with Journal(place) as journal:
        id_ = journal.begin(WEB1)
        journal.finish(id_, "completed", None)
        found = journal.operation(id_)

    assert before - 1 <= found.began_at <= time.time() + 1
    assert found.alive_until == pytest.approx(found.began_at + controller_lease.TTL, abs=1)
    assert found.ended_at is not None
    assert found.began_at <= found.ended_at


def test_the_last_forecast_counts(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    assert journal.forecast(id_) is None
    journal.add_forecast(id_, {"total_ms": 1})
    journal.add_forecast(id_, {"total_ms": 2})
    found = journal.forecast(id_)

    assert found is not None
    assert found.values == {"total_ms": 2}


def test_a_batch_is_written_whole_or_not_at_all(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    broken = Record(kind="x", at=Seconds(0.0), values={"cannot": object()})

    with pytest.raises(JournalError):
        journal.write(id_, Batch(samples=[*sampled(0.0), broken], changes={"phase": "setup"}))

    assert journal.samples(id_) == []
    assert journal.operation(id_).phase is None


def test_samples_of_an_unknown_operation_are_refused(journal: Journal) -> None:
    with pytest.raises(JournalError, match="no job m-none"):
        journal.add_samples("m-none", sampled(0.0))


def test_active_and_past_operations_are_told_apart(journal: Journal, clock: Clock) -> None:
    first = journal.begin(WEB1)
    clock.now += 10
    second = journal.begin(WEB1)
    journal.finish(first, "completed", None)

    assert [one.id for one in journal.operations()] == [second, first]
    assert [one.id for one in journal.operations(active=True)] == [second]
    assert [one.id for one in journal.operations(active=False)] == [first]
    assert [one.id for one in journal.recent("u-1", since=clock.now)] == [second]


def test_ids_are_unique_and_grow_when_short_ones_run_out(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_LETTERS", "ab")
    ids = [journal.begin(WEB1) for _ in range(40)]

    assert len(set(ids)) == 40
    assert max(map(len, ids)) > len("m-aaaa")


@pytest.mark.parametrize("length", [3, 5])
def test_the_beginning_of_an_id_is_enough(journal: Journal, length: int) -> None:
    id_ = journal.begin(WEB1)

    assert journal.operation(id_[:length].upper()).id == id_


def test_a_guest_stands_for_its_only_active_job(journal: Journal) -> None:
    journal.finish(journal.begin(WEB1), "completed", None)
    second = journal.begin(WEB1)

    assert journal.operation("web1").id == second


def test_a_name_that_fits_several_jobs_is_refused_with_their_names(journal: Journal) -> None:
    ids = {journal.begin(WEB1), journal.begin(WEB1)}

    with pytest.raises(BadInput, match=r"is ambiguous: .*; use one of these IDs") as caught:
        journal.operation("web1")
    assert all(id_ in str(caught.value) for id_ in ids)


def test_a_guest_whose_jobs_have_ended_is_refused_with_the_last_one(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    journal.finish(id_, "failed", None)

    with pytest.raises(
        BadInput, match=f"no active job; run vmckpt job {id_} to see the last job \\(failed\\)"
    ):
        journal.operation("web1")


@pytest.mark.parametrize("name", ["m", "m-", "", "%", "m_____"])
def test_a_name_that_would_fit_everything_fits_nothing(journal: Journal, name: str) -> None:
    journal.begin(WEB1)

    with pytest.raises(BadInput, match="no job"):
        journal.operation(name)


def test_an_unknown_job_is_refused_with_likely_names(journal: Journal) -> None:
    journal.begin(WEB1)

    with pytest.raises(BadInput, match="did you mean web1"):
        journal.operation("wbe1")


def test_a_request_is_taken_once_and_answered_once(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    number = journal.ask(id_, "bandwidth", {"bytes_per_second": None}, "eve@desk")
    [taken] = journal.take_requests(id_)

    assert (taken.id, taken.kind, taken.arguments) == (
        number,
        "bandwidth",
        {"bytes_per_second": None},
    )
    assert journal.take_requests(id_) == []
    assert [(one.id, one.answered_at) for one in journal.requests(id_)] == [(number, None)]
    journal.answer(number, "no limit", ok=True)
    journal.answer(number, "too late", ok=False)
    assert journal.request(number).answered_at is not None
    assert (journal.request(number).ok, journal.request(number).answer) == (True, "no limit")


def test_a_request_can_be_withdrawn_until_it_is_taken(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    first, second = journal.ask(id_, "pause", {}, "e"), journal.ask(id_, "cancel", {}, "e")

    assert journal.withdraw(first)
    assert [one.id for one in journal.take_requests(id_)] == [second]
    assert not journal.withdraw(second)


def test_an_end_answers_open_requests_and_new_ones_are_refused(journal: Journal) -> None:
    id_ = journal.begin(WEB1)
    number = journal.ask(id_, "postcopy", {}, "e")
    journal.finish(id_, "completed", None)

    assert journal.request(number).answer == f"{id_} has ended: completed"
    with pytest.raises(BadInput, match="has ended: completed"):
        journal.ask(id_, "cancel", {}, "e")
