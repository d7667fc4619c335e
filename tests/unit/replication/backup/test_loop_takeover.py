"""When a backup that is at work says that the guest is its own."""

import threading
import time
from collections.abc import Iterator

import pytest

from tests.support import staging
from tests.support.backing import (
    AUTOMATIC,
    FINAL,
    ONE,
    TWO,
    Following,
    commit,
    following,
    refused_to_run,
)
from tests.support.replicas import LEASE, until
from vmckpt.replication.backup import loop as loops
from vmckpt.replication.control_socket import Request
from vmckpt.replication.protocol.messages import End, Heartbeat
from vmckpt.replication.session import ProtectionTerms
from vmckpt.units import Seconds


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[Following]:
    with following(monkeypatch) as made:
        yield made


def test_a_guest_that_is_handed_over_is_ours_without_asking(one: Following) -> None:
    one.begin(lease=LEASE)
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.send(End(why="switched"))
    ours = one.came()
    assert ours is not None
    assert "handed the guest over" in ours.why
    assert one.world() == TWO.after


def test_a_final_epoch_alone_is_no_handover(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.close()
    assert refused_to_run(one)


def test_after_a_final_epoch_the_lease_is_asked_if_nothing_more_is_heard(one: Following) -> None:
    one.begin(lease=LEASE)
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.close()
    until(lambda: one.claim.asked > 0)
    one.claim.free = True
    ours = one.came()
    assert ours is not None
    assert ours.why == "planned switchover; took over the lease with token 2"


def test_a_new_agent_knows_that_the_last_epoch_was_final(one: Following) -> None:
    staging.run(one.stage, ONE, FINAL)
    one.claim.free = True
    one.begin(lease=LEASE)
    ours = one.came()
    assert ours is not None
    assert ours.why.startswith("planned switchover")


def test_nobody_who_might_still_connect_is_waited_for(
    one: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_ACCEPT", Seconds(30.0))
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    one.requests.add(Request.FAILOVER)
    assert one.came() is not None


def test_a_primary_that_comes_back_is_not_dead_whatever_a_person_said(one: Following) -> None:
    one.begin()
    line, _ = one.hello()
    line.close()
    one.requests.add(Request.FAILOVER)
    line, _ = one.hello()
    commit(line, ONE)
    assert refused_to_run(one)


def test_a_switch_that_failed_is_over_when_the_primary_comes_back(one: Following) -> None:
    one.begin(lease=LEASE)
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.close()
    until(lambda: one.claim.asked > 0)
    one.hello(captured=2)
    asked = one.claim.asked
    assert refused_to_run(one)
    assert one.claim.asked <= asked + 1


def test_a_silent_primary_is_left_when_the_lease_says_so(one: Following) -> None:
    one.begin(lease=LEASE, terms=AUTOMATIC)
    line, _ = one.hello()
    commit(line, ONE)
    line.close()
    until(lambda: one.claim.asked > 1)
    assert one.thread.is_alive()
    one.claim.free = True
    ours = one.came()
    assert ours is not None
    assert ours.why.startswith("the primary was silent for")
    assert ours.why.endswith("took over the lease with token 2")
    assert one.world() == ONE.after


def test_a_primary_that_says_something_is_not_asked_for(one: Following) -> None:
    one.claim.patience = Seconds(0.2)
    one.begin(lease=LEASE, terms=AUTOMATIC)
    line, _ = one.hello()
    commit(line, ONE)
    for _ in range(20):
        line.send(Heartbeat(sent=1.0, note=b""))
        one.requests.wait(Seconds(0.02))
    assert one.claim.asked == 0
    until(lambda: one.claim.asked > 0)


@pytest.mark.parametrize(
    ("automatic", "committed"), [(True, False), (False, True)], ids=["nothing whole", "by hand"]
)
def test_silence_asks_nobody_where_it_may_not(
    one: Following, *, automatic: bool, committed: bool
) -> None:
    one.claim.free = True
    one.claim.patience = Seconds(0.0)
    one.begin(lease=LEASE, terms=ProtectionTerms(interval=None, automatic=automatic))
    line, _ = one.hello()
    if committed:
        commit(line, ONE)
    line.close()
    assert refused_to_run(one)
    assert one.claim.asked == 0


def test_a_person_with_a_lease_store_has_it_asked(one: Following) -> None:
    one.begin(lease=LEASE)
    line, _ = one.hello()
    commit(line, ONE)
    one.requests.add(Request.FAILOVER)
    waits = "the lease cannot be taken over for another 1.00 s"
    until(lambda: one.backup.as_json()["says"] == waits)
    one.claim.broken = True
    until(lambda: one.backup.as_json()["says"] == "the witness gave no answer")
    one.claim.broken, one.claim.free = False, True
    ours = one.came()
    assert ours is not None
    assert ours.why.startswith("failover requested; ")


def test_a_guest_that_moves_is_nobodys_before_its_last_epoch(one: Following) -> None:
    one.begin(moves=True)
    line, _ = one.hello()
    commit(line, ONE)
    line.close()
    one.requests.add(Request.FAILOVER)
    assert refused_to_run(one)


def test_a_guest_that_moves_is_ours_when_its_controller_knows_that_it_was_given_away(
    one: Following,
) -> None:
    """The source's own word was lost."""
    one.begin(moves=True)
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.close()
    assert refused_to_run(one)
    one.requests.add(Request.FAILOVER)
    ours = one.came()
    assert ours is not None
    assert ours.why == "the controller confirmed the source's handover"
    assert one.world() == TWO.after


def test_who_takes_a_guest_over_knows_whom_to_tell(one: Following) -> None:
    one.begin(moves=True)
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.send(End(why="switched"))
    ours = one.came()
    assert ours is not None
    assert ours.line is not None
    ours.line.send(End(why="the guest is running on the backup"))
    until(lambda: isinstance(line.receive(Seconds(0.1)), End))


def test_a_handover_that_is_said_again_over_another_line_counts(one: Following) -> None:
    """Without a hello, which would take the last epoch's finality back."""
    one.begin(moves=True)
    line, _ = one.hello()
    commit(line, ONE, FINAL)
    line.close()
    one.line().send(End(why="switched"))
    ours = one.came()
    assert ours is not None
    assert "handed the guest over" in ours.why


def test_a_person_who_was_wrong_is_not_taken_at_his_word_when_the_line_hiccups_later(
    one: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_WRONG", Seconds(0.1))
    one.begin()
    line, _ = one.hello()
    commit(line, ONE)
    over, quiet = threading.Event(), threading.Event()

    def beats() -> None:
        while not over.wait(0.01):
            if not quiet.is_set():
                line.send(Heartbeat(sent=0.0, note=b"{}"))

    beating = threading.Thread(target=beats)
    beating.start()
    try:
        one.requests.add(Request.FAILOVER)
        until(lambda: not one.requests.has(Request.FAILOVER))
        assert one.backup.as_json()["says"] == "failover request dropped: the primary is answering"
        quiet.set()
        time.sleep(0.3)
        assert one.thread.is_alive()
    finally:
        over.set()
        beating.join()


def test_a_standby_whose_qemu_has_ended_is_none(one: Following) -> None:
    lives = [True]
    one.begin(lives=lambda: lives[0])
    line, _ = one.hello()
    commit(line, ONE)
    lives[0] = False
    one.thread.join(5.0)
    assert [type(exc) for exc in one.raised] == [loops.StandbyGone]
