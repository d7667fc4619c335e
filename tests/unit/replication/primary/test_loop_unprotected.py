"""When the primary goes on without its backup, and how long it leaves that in peace."""

import time
from collections.abc import Iterator, Sequence

import pytest

from tests.support.primaries import World, world
from tests.support.replicas import LEASE, until
from vmckpt.replication.control_socket import Requests
from vmckpt.replication.dirty_pages.finder import Changed
from vmckpt.replication.primary import loop
from vmckpt.replication.primary.sender import Sender
from vmckpt.replication.session import ProtectionTerms
from vmckpt.replication.status import Phase
from vmckpt.units import Seconds
from vmckpt_lab.machine_speed import slowness

HOLDS = ProtectionTerms(interval=Seconds(0.02), automatic=False, hold=Seconds(0.3))
RARELY = ProtectionTerms(interval=Seconds(9.0), automatic=False)
LAST_WORDS = ("invalidated", "alone", "let all out", "mirrored no more")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))


@pytest.fixture
def one() -> Iterator[World]:
    with world() as made:
        yield made


@pytest.fixture
def soon_alone() -> Iterator[World]:
    with world(terms=HOLDS) as made:
        yield made


def test_why_it_went_alone_is_told_as_long_as_it_is(soon_alone: World) -> None:
    one = soon_alone
    with one.run():
        one.epochs(1)
        one.peer.refuses = "no room is left for epoch 7"
        one.peer.away = True
        until(lambda: one.lease_holder.line is None)
        one.peer.away = False
        until(lambda: one.phase() == Phase.ALONE)
        assert "no room is left for epoch 7" in one.says()


def test_a_standby_that_never_was_whole_is_not_waited_for_if_the_lease_says_so() -> None:
    """Its first epoch fails: nothing can go on from it, so nobody outside has to wait."""
    with world(terms=RARELY, lease=LEASE) as one:
        one.peer.lose = {1}
        with one.run():
            until(lambda: one.phase() == Phase.ALONE)
            after = [event for event in one.since("hold") if event in LAST_WORDS]
            assert after[:4] == list(LAST_WORDS)
            one.epochs(1)


def test_a_copy_that_broke_off_leaves_the_guest_alone_and_says_so(one: World) -> None:
    one.peer.refuses = "no room for epochs"
    with one.run():
        until(lambda: one.phase() == Phase.ALONE)
        assert "no room for epochs" in one.says()
        one.peer.refuses = None
        one.epochs(1)
        assert one.phase() == Phase.PROTECTING


def test_without_a_lease_a_first_epoch_that_may_be_there_is_waited_for(one: World) -> None:
    """Nobody but the backup knows whether a person may let the guest run from it."""
    one.peer.lose = {1}
    with one.run():
        until(lambda: one.lease_holder.line is None and "hold" in one.events)
        one.peer.away = True
        one.requests.wait(Seconds(0.2))
        assert "let all out" not in one.since("hold")
        assert one.phase() != Phase.ALONE


def test_a_backup_that_is_copied_to_in_vain_is_left_in_peace_for_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time all of the disks are copied; and it is tried again at once after a good one."""
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.05))
    with world(terms=RARELY, lease=LEASE) as one:
        one.peer.lose = {1, 2, 3}
        began = time.monotonic()
        with one.run():
            one.epochs(1)
            assert time.monotonic() - began > 0.1 + 0.2 + 0.4
            count = len(one.peer.hellos)
            one.peer.away = True
            until(lambda: one.lease_holder.line is None)
            one.peer.away = False
            begun = time.monotonic()
            until(lambda: len(one.peer.hellos) > count)
            assert time.monotonic() - begun < 0.5 * slowness()


def test_when_an_epoch_was_captured_is_told_however_long_sending_it_took(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[float] = []
    one.capturer.before = lambda _: captured.append(time.time())
    memory = Sender.memory

    def slow(sender: Sender, number: int, changed: Sequence[Changed]) -> None:
        time.sleep(0.3)
        memory(sender, number, changed)

    monkeypatch.setattr(Sender, "memory", slow)
    with one.run():
        one.epochs(2)
    late = [seal.taken - at for seal, at in zip(one.peer.seals, captured, strict=False)]
    assert max(late) < 0.2


def test_whoever_hangs_between_two_epochs_is_told_from_one_who_waits(one: World) -> None:
    """Its output is held then: a lease that is renewed all the same would keep the standby away."""
    at_work: list[bool] = []
    run_state = one.qemu.run_state

    def asked() -> str:
        at_work.append(one.lease_holder.at_work > 0)
        return run_state()

    one.qemu.run_state = asked  # type: ignore[method-assign]
    with one.run():
        one.epochs(3)
        assert at_work
        assert all(at_work)


def test_who_is_told_to_end_knows_whether_its_standby_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "_AGAIN", Seconds(0.01))
    with world() as one:
        with one.run():
            one.epochs(1)
        assert one.primary.standby_ended
        assert one.peer.ends == ["the protection has ended"]
    terms = ProtectionTerms(interval=Seconds(0.02), automatic=True, hold=Seconds(0.2))
    with world(terms=terms) as one:
        with one.run():
            one.epochs(1)
            one.peer.away = True
            until(lambda: one.leave.wanted is not None)
        assert one.raised is None
        assert not one.primary.standby_ended  # its output must not be let out


@pytest.mark.parametrize("command", ["query-block-jobs", "query-pci"])
def test_all_that_qemu_is_asked_between_epochs_may_hang_and_is_at_work(command: str) -> None:
    """A lease that is renewed meanwhile would cut the guest off for as long as that hangs."""
    with world() as one:
        seen: list[bool] = []
        ask = one.qemu.ask

        def asked(what: str, **more: object) -> object:
            if what == command and one.phase() == Phase.PROTECTING:
                seen.append(one.lease_holder.at_work > 0)
            return ask(what, **more)

        def looked() -> None:
            seen.append(command != "query-pci" or one.lease_holder.at_work > 0)

        one.qemu.ask = asked  # type: ignore[method-assign, assignment]
        one.devices.on_look = looked
        with one.run():
            one.epochs(3)
        assert seen
        assert all(seen)


def test_an_agent_that_finds_a_filter_gone_forgoes_the_standby_before_anything_gets_out() -> None:
    """The standby's host may be away, and its epoch is from before what goes out."""
    terms = ProtectionTerms(interval=Seconds(0.02), automatic=True, hold=Seconds(0.3))
    with world(terms=terms, lease=LEASE) as one:
        with one.run():
            one.epochs(3)
            one.peer.away = True
        before = len(one.events)
        one.parts["requests"] = one.requests = Requests()
        with one.run(held=False, whole=False, begun=False):
            until(lambda: "alone" in one.events[before:])
        after = [event for event in one.events[before:] if event in LAST_WORDS]
        assert after[:3] == ["invalidated", "alone", "let all out"]


def test_without_a_lease_store_that_takes_leave() -> None:
    with world(terms=ProtectionTerms(interval=Seconds(0.02), automatic=True)) as one:
        with one.run():
            until(lambda: "not alone" in one.events)
        one.parts["requests"] = one.requests = Requests()
        before = len(one.events)
        with one.run(held=False, whole=False, begun=False):
            until(lambda: one.leave.wanted is not None)
            assert "let all out" not in one.events[before:]
            assert one.leave.grant(str(one.leave.wanted))
            until(lambda: "let all out" in one.events[before:])


def test_a_card_that_is_unplugged_ends_no_agent() -> None:
    with world() as one:
        with one.run():
            one.epochs(2)
            one.held.unplugged = True
            until(lambda: "let all out" in one.since("hold"))
            until(lambda: "plugged or unplugged" in one.says())
        assert "invalidated" in one.since("hold")
