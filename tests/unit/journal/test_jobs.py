"""Jobs of other terminals: who attends them, and what becomes of a request."""

import threading

import pytest

from tests.support.recorded_jobs import dead, filled, journal
from vmckpt.errors import BadInput, OrphanedJobs, OutcomeUnknown, VmckptError
from vmckpt.journal import jobs as journal_jobs
from vmckpt.journal.jobs import Answer
from vmckpt.journal.records import Operation, RequestKind
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

__all__ = ["journal"]


SHORT = Seconds(0.3)


def test_a_job_whose_controller_is_dead_is_unattended(journal: Journal) -> None:
    alive, lost = filled(journal), dead(journal)
    views = {view.operation.id: view for view in journal_jobs.jobs(journal)}

    assert (views[alive].unattended, views[alive].doing) == (False, "pre-copy")
    assert (views[lost].unattended, views[lost].doing) == (True, "unattended")


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

    with pytest.raises(OutcomeUnknown, match="may or may not have been carried out"):
        journal_jobs.control(journal, id_, RequestKind.CANCEL, {}, patience=SHORT)
    taker.join()


def test_an_end_while_waiting_is_an_answer(journal: Journal) -> None:
    id_ = filled(journal)
    end = threading.Timer(0.1, lambda: journal.finish(id_, "completed", None))
    end.start()
    answer = journal_jobs.control(journal, id_, RequestKind.POSTCOPY, {})
    end.join()

    assert answer == Answer(ok=False, text=f"{id_} has ended: completed")


def test_every_error_of_the_desk_has_an_exit_code_of_its_own_kind() -> None:
    codes = {kind: kind.exit_code for kind in (BadInput, OutcomeUnknown, OrphanedJobs)}

    assert len(set(codes.values())) == len(codes)
    assert all(issubclass(kind, VmckptError) for kind in codes)
