"""Who may change a guest, and what is written before it is changed."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.journals import WEB1, Clock
from vmckpt.errors import GuestLocked, JournalError, LeaseLost
from vmckpt.journal import controller_identity
from vmckpt.journal.records import (
    Batch,
    ControllerIdentity,
    Operation,
    Record,
    StepState,
)
from vmckpt.journal.store import Journal
from vmckpt.lease import controller_lease
from vmckpt.lease.controller_lease import Fence
from vmckpt.units import Seconds

GUEST = "guest/u-1"
FAR = ControllerIdentity(host="far", boot="another", pid=7, started=9)
DEAD = replace(controller_identity.this_process(), started=1)
NOTED = Record(kind="noted", at=Seconds(1.0), values={})


def held(journal: Journal, controller: ControllerIdentity | None = None) -> tuple[str, Fence]:
    """An operation with the lease on its guest."""
    id_ = journal.begin(WEB1, asked_by="eve@desk", controller=controller)
    return id_, journal.acquire(id_, GUEST)


def test_a_guest_has_one_operation_at_a_time_and_the_other_is_told_which(journal: Journal) -> None:
    first, fence = held(journal)
    second = journal.begin(WEB1)

    with pytest.raises(GuestLocked) as caught:
        journal.acquire(second, GUEST)
    assert str(caught.value).startswith(
        f"guest web1 is locked by job {first} (migrate), started by eve@desk at 2023-11-14T22:13:20"
    )
    assert f"vmckpt cancel {first}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not caught.value.interrupted
    assert fence == Fence(resource=GUEST, token=1, operation=first)


def test_who_has_a_lease_is_given_the_same_again(journal: Journal) -> None:
    id_, fence = held(journal)

    assert journal.acquire(id_, GUEST) == fence


def test_other_guests_are_free(journal: Journal) -> None:
    held(journal)

    assert journal.acquire(journal.begin(WEB1), "guest/u-2").token == 1


@pytest.mark.parametrize("how", ["release", "finish"])
def test_a_lease_that_is_given_back_is_free_and_its_token_grows(journal: Journal, how: str) -> None:
    id_, fence = held(journal)
    if how == "release":
        journal.release(fence)
    else:
        journal.finish(id_, "completed", None)

    assert held(journal)[1].token == 2
    journal.release(fence)  # too late: it is another's
    with pytest.raises(GuestLocked):
        held(journal)


def test_an_operation_that_has_ended_can_hold_nothing(journal: Journal) -> None:
    id_, fence = held(journal)
    journal.finish(id_, "completed", None)

    with pytest.raises(LeaseLost, match="has ended the job: completed"):
        journal.acquire(id_, GUEST)
    with pytest.raises(LeaseLost):
        journal.intend(id_, "move", {}, fence)
    assert held(journal)[1].token == 2


def test_an_operation_that_was_interrupted_keeps_its_guest_until_it_is_settled(
    journal: Journal,
) -> None:
    id_, _ = held(journal, DEAD)
    with pytest.raises(
        GuestLocked, match=f"locked by the interrupted job {id_} .*; run vmckpt recover"
    ) as caught:
        held(journal)
    assert caught.value.interrupted
    journal.take_over(journal.operation(id_))
    journal.finish(id_, "failed", None)

    assert held(journal)[1].token == 3


def test_a_holder_on_another_machine_is_interrupted_once_it_is_not_heard_of(
    journal: Journal, clock: Clock
) -> None:
    held(journal, FAR)
    clock.now += controller_lease.TTL - 1
    with pytest.raises(GuestLocked, match="process 7 on far; run vmckpt watch"):
        held(journal)
    clock.now += 2
    with pytest.raises(GuestLocked, match="run vmckpt recover"):
        held(journal)


def test_what_a_lost_lease_would_write_is_refused_whole(journal: Journal) -> None:
    id_, stale = held(journal, DEAD)
    step = journal.intend(id_, "move", {}, stale)
    journal.take_over(journal.operation(id_))

    with pytest.raises(LeaseLost, match="another controller has taken over the lease guest/u-1"):
        journal.write(id_, Batch(events=[NOTED], ending=("completed", None)), stale)
    with pytest.raises(LeaseLost):
        journal.intend(id_, "move", {}, stale)
    with pytest.raises(LeaseLost):
        journal.conclude(id_, step, StepState.DONE, {}, stale)
    assert journal.events(id_) == []
    assert journal.operation(id_).active
    assert [one.state for one in journal.steps(id_)] == [StepState.INTENDED]


def test_what_an_ended_holder_has_left_to_write_is_written_until_somebody_else_is_there(
    journal: Journal,
) -> None:
    id_, fence = held(journal)
    journal.finish(id_, "completed", None)
    journal.write(id_, Batch(events=[NOTED]), fence)
    held(journal)

    with pytest.raises(LeaseLost, match=r"m-.* has taken over the lease guest/u-1"):
        journal.write(id_, Batch(events=[NOTED]), fence)
    assert len(journal.events(id_)) == 1


def test_a_heartbeat_says_until_when_a_controller_may_be_believed(
    journal: Journal, clock: Clock
) -> None:
    id_, fence = held(journal)
    clock.now += 100
    journal.heartbeat(id_, Seconds(7.0), fence)

    assert journal.operation(id_).alive_until == clock.now + 7


def test_a_heartbeat_of_who_is_no_longer_the_controller_is_refused(journal: Journal) -> None:
    theirs = journal.begin(WEB1, controller=DEAD)
    with pytest.raises(LeaseLost, match="has taken over the job"):
        journal.heartbeat(theirs)
    ours, fence = held(journal)
    with pytest.raises(LeaseLost):
        journal.heartbeat(ours, fence=replace(fence, token=fence.token - 1))
    journal.finish(ours, "completed", None)
    with pytest.raises(LeaseLost, match="has ended"):
        journal.heartbeat(ours, fence=fence)


def test_steps_are_read_as_they_were_intended_and_concluded(journal: Journal, clock: Clock) -> None:
    id_, fence = held(journal)
    first = journal.intend(id_, "make-images", {"paths": ["/a"]}, fence)
    second = journal.intend(id_, "move", {}, None)
    clock.now += 2
    journal.conclude(id_, first, StepState.INTENDED, {"marks": 1}, fence)
    journal.conclude(id_, second, StepState.FAILED, None, fence)
    one, two = journal.steps(id_)

    assert (one.seq, one.name, one.intent) == (1, "make-images", {"paths": ["/a"]})
    assert (one.state, one.result, one.ended_at) == (StepState.INTENDED, {"marks": 1}, None)
    assert (two.seq, two.state, two.result) == (2, StepState.FAILED, None)
    assert (two.began_at, two.ended_at) == (clock.now - 2, clock.now)
    journal.conclude(id_, first, StepState.UNDONE, {}, fence)
    assert journal.steps(id_)[0].as_json() == {
        "step": 1, "name": "make-images", "intent": {"paths": ["/a"]}, "state": "undone",
        "result": {}, "began": "2023-11-14T22:13:20.000+00:00",
        "ended": "2023-11-14T22:13:22.000+00:00",
    }  # fmt: skip
    with pytest.raises(JournalError, match="has no step 3"):
        journal.conclude(id_, 3, StepState.DONE, {}, fence)


def test_abandoned_are_those_that_are_active_and_whose_controller_is_gone(
    journal: Journal, clock: Clock
) -> None:
    far = journal.begin(WEB1, controller=FAR)
    clock.now += 1
    dead = journal.begin(WEB1, controller=DEAD)
    journal.finish(journal.begin(WEB1, controller=DEAD), "failed", None)
    journal.begin(WEB1)

    assert [one.id for one in journal.abandoned()] == [dead]
    clock.now += controller_lease.TTL
    assert [one.id for one in journal.abandoned()] == [far, dead]


def test_an_abandoned_operation_is_taken_over_with_its_guest(journal: Journal) -> None:
    id_, stale = held(journal, DEAD)
    step = journal.intend(id_, "move", {}, stale)
    [found] = journal.abandoned()
    fence = journal.take_over(found)

    assert fence == Fence(resource=GUEST, token=2, operation=id_)
    assert journal.abandoned() == []
    assert journal.operation(id_).controller == controller_identity.this_process()
    journal.conclude(id_, step, StepState.UNDONE, {}, fence)
    for refused in (
        lambda: journal.conclude(id_, step, StepState.DONE, {}, stale),
        lambda: journal.write(id_, Batch(events=[NOTED]), by=DEAD),
        lambda: journal.intend(id_, "move", {}, None, by=DEAD),
    ):
        with pytest.raises(LeaseLost):
            refused()


def test_a_lease_tells_whose_guest_it_is(journal: Journal) -> None:
    id_ = journal.begin(replace(WEB1, guest_uuid=None), controller=DEAD)
    journal.acquire(id_, GUEST)
    [found] = journal.abandoned()

    assert found.guest_uuid == "u-1"
    assert journal.take_over(found) == Fence(resource=GUEST, token=2, operation=id_)


def test_an_operation_whose_guest_is_not_known_is_taken_over_without_a_lease(
    journal: Journal,
) -> None:
    id_ = journal.begin(replace(WEB1, guest_uuid=None), controller=DEAD)
    [found] = journal.abandoned()

    assert journal.take_over(found) is None
    journal.heartbeat(id_)


def _again(journal: Journal, found: Operation) -> None:
    journal.take_over(found)


def _ended(journal: Journal, found: Operation) -> None:
    journal.finish(found.id, "failed", None)


@pytest.mark.parametrize("meanwhile", [_again, _ended])
def test_who_comes_second_takes_nothing_over(
    journal: Journal, meanwhile: Callable[[Journal, Operation], None]
) -> None:
    held(journal, DEAD)
    [found] = journal.abandoned()
    meanwhile(journal, found)

    with pytest.raises(GuestLocked):
        journal.take_over(found)


def test_whose_guest_another_operation_has_is_not_taken_over(journal: Journal) -> None:
    journal.begin(WEB1, controller=DEAD)  # it died before it had the guest
    other, _ = held(journal)
    [found] = journal.abandoned()

    with pytest.raises(GuestLocked, match=other):
        journal.take_over(found)
    journal.finish(other, "completed", None)
    assert journal.take_over(found) == Fence(resource=GUEST, token=2, operation=found.id)


def test_what_is_attended_is_not_taken_over(journal: Journal, clock: Clock) -> None:
    near, far = journal.begin(WEB1), journal.begin(WEB1, controller=FAR)

    for id_ in (near, far):
        with pytest.raises(GuestLocked, match=f"{id_} is run by"):
            journal.take_over(journal.operation(id_))
    clock.now += controller_lease.TTL + 1
    assert journal.take_over(journal.operation(far)) is not None


def test_what_is_left_can_be_taken_over_at_once_and_is_kept_from_who_left_it(
    journal: Journal,
) -> None:
    id_, fence = held(journal)
    journal.leave(id_)
    [found] = journal.abandoned()

    with pytest.raises(LeaseLost, match="its controller has given up control"):
        journal.heartbeat(id_, fence=fence)
    with pytest.raises(LeaseLost):
        journal.leave(id_)
    assert controller_lease.abandoned(None, found.alive_until, journal.now())
    assert journal.take_over(found) == replace(fence, token=2)
