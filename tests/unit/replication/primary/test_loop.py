"""The primary's loop, with a guest that is files and a backup that may fail in any way."""

import re
from collections.abc import Callable, Iterator

import pytest

from tests.support.primaries import World, world
from tests.support.replicas import until
from vmckpt.capture.memory.shared_memory import Resumed
from vmckpt.errors import HypervisorError, LeaseLost
from vmckpt.replication.control_socket import Request
from vmckpt.replication.disks import mirror_job
from vmckpt.replication.primary import loop
from vmckpt.replication.primary.epoch_capture import Epoch
from vmckpt.replication.primary.loop import Switched
from vmckpt.replication.primary.network_buffer import EARLY
from vmckpt.replication.session import ProtectionTerms
from vmckpt.replication.status import Phase
from vmckpt.units import Seconds

HOLDS = ProtectionTerms(interval=Seconds(0.02), automatic=False, hold=Seconds(0.3))
LAST_WORDS = ("invalidated", "alone", "let all out", "mirrored no more")
RARELY = ProtectionTerms(interval=Seconds(9.0), automatic=False)


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


def test_a_first_copy_brings_memory_and_disk_and_epochs_follow_them(one: World) -> None:
    one.memory.write(0, 3, 77)
    one.memory.write(1, 8, 5)
    one.disk.write(512, b"before" * 100)
    with one.run():
        one.epochs(1)
        one.memory.write(0, 3, 78)
        one.disk.write(600, b"then")
        one.disk.trim(512, 20)
        one.epochs(2)
        assert one.follows()
    assert [hello.captured for hello in one.peer.hellos] == [0]
    assert one.peer.bulk
    assert one.disk.log.consumed == one.disk.log.size()
    assert one.raised is None


def test_output_goes_out_only_once_its_epoch_is_committed(one: World) -> None:
    with one.run():
        one.epochs(3)
    told = [re.sub(r" \d+", "", event) for event in one.events]
    told = told[told.index("hold") :]
    first = ["hold", "not alone", "captured", "committed", "validated", "released"]
    assert told[: len(first)] == first
    rest = told[len(first) :]
    assert rest[: len(rest) // 3 * 3] == ["captured", "committed", "released"] * (len(rest) // 3)


def test_the_standby_is_declared_valid_once_and_after_a_whole_epoch(one: World) -> None:
    with one.run():
        one.epochs(4)
    assert one.events.count("validated") == 1
    assert one.events.index("validated") > one.events.index("committed 1")


def test_a_standby_that_the_witness_forgot_is_declared_valid_again(one: World) -> None:
    with one.run():
        one.epochs(2)
        one.lease_holder.validated = False
        one.epochs(2)
        one.lease_holder.validated = True
        one.epochs(2)
    assert one.events.count("validated") > 1


def test_an_acknowledgement_that_was_lost_counts_once_the_backup_is_back(one: World) -> None:
    one.peer.unheard = {2}
    one.capturer.before = lambda count: one.memory.write(0, min(count, 3), min(count, 3))
    with one.run():
        until(lambda: len(one.peer.hellos) == 2)
        one.epochs(2)
        assert one.follows()
    assert [(seal.epoch, seal.base) for seal in one.peer.seals[:3]] == [(1, 0), (2, 1), (3, 2)]
    after = one.since("committed 2")
    assert after[:2] == ["released", "captured"]
    assert one.peer.hellos[1].captured == 2


def test_an_epoch_that_did_not_arrive_is_in_the_next_one(one: World) -> None:
    one.peer.lose = {2}

    def work(count: int) -> None:
        if count == 2:
            one.memory.write(0, 11, 11)
            one.disk.write(0, b"lost on the way")
        if count == 3:
            one.memory.write(1, 3, 3)
            one.disk.write(5, b"later")

    one.capturer.before = work
    with one.run():
        until(lambda: len(one.peer.seals) >= 3)
        one.epochs(1)
        assert one.follows()
    assert [(seal.epoch, seal.base) for seal in one.peer.seals[:3]] == [(1, 0), (3, 1), (4, 3)]
    # Nothing of the second epoch got out before the third one was safe.
    captured = [at for at, event in enumerate(one.events) if event == "captured"]
    assert "released" not in one.events[captured[1] : one.events.index("committed 3")]


def test_a_page_that_changes_back_after_a_lost_epoch_is_right_all_the_same(one: World) -> None:
    """The last copy has what was sent and never committed."""
    one.memory.write(0, 4, 9)
    one.peer.lose = {2}
    one.capturer.before = lambda count: one.memory.mapped[0].pages[4].fill(7 if count == 2 else 9)
    with one.run():
        until(lambda: len(one.peer.seals) >= 2)
        one.epochs(1)
        assert one.follows()


def test_while_there_is_no_standby_yet_nothing_is_held(one: World) -> None:
    with one.run():
        one.epochs(1)
    first = ["invalidated", "alone", "let all out", "read", "read no more"]
    assert one.events[:7] == [*first, "hold", "not alone"]


def test_the_guest_goes_alone_only_once_that_is_written_down(soon_alone: World) -> None:
    one = soon_alone
    with one.run():
        one.epochs(1)
        begun = len(one.events)
        one.lease_holder.unreachable = True
        one.peer.away = True
        until(lambda: "cannot be recorded" in one.says())
        assert "let all out" not in one.events[begun:]
        assert one.phase() != Phase.ALONE
        one.lease_holder.unreachable = False
        until(lambda: one.phase() == Phase.ALONE)
        after = [event for event in one.events[begun:] if event in LAST_WORDS]
        assert after == list(LAST_WORDS)


def test_a_standby_whose_end_may_have_been_noted_is_declared_valid_again(soon_alone: World) -> None:
    """Nobody knows whether the witness has heard of it."""
    one = soon_alone
    with one.run():
        one.epochs(1)
        one.lease_holder.unreachable = True
        one.peer.away = True
        until(lambda: "cannot be recorded" in one.says())
        begun = len(one.events)
        one.peer.away = False
        one.epochs(2)
    assert one.events[begun:].count("validated") == 1


def test_a_backup_that_talks_nonsense_is_called_again(one: World) -> None:
    one.peer.note = b"no JSON"
    with one.run():
        until(lambda: len(one.peer.hellos) > 1)
        one.peer.note = b"{}"
        one.epochs(2)


def test_before_the_time_is_up_output_waits_for_the_backup(one: World) -> None:
    with one.run():
        one.epochs(1)
        begun = len(one.events)
        one.peer.away = True
        until(lambda: one.lease_holder.line is None)
        one.requests.wait(Seconds(0.05))
        assert one.phase() != Phase.ALONE
        one.peer.away = False
        one.epochs(1)
    assert not set(LAST_WORDS) & set(one.events[begun:])


def test_a_guest_that_went_alone_is_protected_again_from_the_beginning(soon_alone: World) -> None:
    one = soon_alone
    with one.run():
        one.epochs(1)
        one.peer.away = True
        until(lambda: one.phase() == Phase.ALONE)
        begun = len(one.events)
        one.memory.write(0, 1, 1)
        one.peer.away = False
        one.epochs(2)
        assert one.phase() == Phase.PROTECTING
        assert one.follows()
    assert one.peer.hellos[-1].captured == 0
    told = [re.sub(r" \d+", "", event) for event in one.events[begun:]]
    begins = ["mirrored anew", "hold", "captured", "committed", "validated", "released"]
    assert [event for event in told if event in begins][: len(begins)] == begins


def test_a_planned_switch_gives_the_guest_away_when_the_backup_has_all(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.memory.write(0, 2, 2)
        one.requests.add(Request.PLANNED)
        assert isinstance(one.ended(), Switched)
        until(lambda: bool(one.peer.ends))
        assert one.follows()
    assert one.peer.seals[-1].final
    assert not any(seal.final for seal in one.peer.seals[:-1])
    assert one.capturer.goes_on[-1] is False
    last = f"committed {one.peer.seals[-1].epoch}"
    assert one.since(last)[-1] == "given away"
    assert one.since("switching")[:2] == ["captured", last]
    assert one.peer.ends == ["switched"]


def test_a_planned_switch_that_fails_lets_the_guest_go_on(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.peer.lose = set(range(1, 1000))
        one.requests.add(Request.PLANNED)
        until(lambda: "go on" in one.events)
        assert not one.requests.has(Request.PLANNED)
        one.peer.lose = set()
        one.epochs(2)
        assert one.phase() == Phase.PROTECTING
    assert "given away" not in one.events
    assert not any(seal.final for seal in one.peer.seals)


def test_a_guest_that_somebody_paused_is_not_switched(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.qemu.state = "paused"
        one.requests.add(Request.PLANNED)
        until(lambda: not one.requests.has(Request.PLANNED))
    assert "switching" not in one.events
    assert not any(seal.final for seal in one.peer.seals)


def test_a_backup_that_answers_and_takes_nothing_is_left_as_well(soon_alone: World) -> None:
    one = soon_alone
    with one.run():
        one.epochs(1)
        one.peer.lose = set(range(1, 10**6))
        until(lambda: one.phase() == Phase.ALONE)
        one.peer.lose = set()
        one.epochs(1)


def test_another_machine_than_the_standby_is_not_protected(one: World) -> None:
    one.devices.are_same = False
    with one.run():
        until(lambda: "plugged or unplugged" in one.says())
        assert one.phase() == Phase.ALONE
    assert "captured" not in one.events


def test_what_ends_is_told_to_the_backup(one: World) -> None:
    with one.run():
        one.epochs(1)
    until(lambda: one.peer.ends == ["the protection has ended"])
    assert one.raised is None


def test_a_guest_that_somebody_paused_is_left_alone(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.qemu.state = "paused"
        until(lambda: "the guest is paused" in one.says())
        one.qemu.state = "io-error"
        until(lambda: "the guest is not running (QEMU's state: io-error)" in one.says())
        count = one.capturer.count
        one.qemu.state = "running"
        one.epochs(1)
        assert one.capturer.count > count
        one.qemu.migration = {"status": "active"}
        until(lambda: "another job" in one.says())


def test_a_backup_that_refuses_is_told_of_and_asked_again(one: World) -> None:
    one.peer.refuses = "it is somebody else's"
    with one.run():
        until(lambda: "it is somebody else's" in one.says())
        assert one.capturer.count == 0
        one.peer.refuses = None
        one.epochs(1)


def test_without_the_lease_nothing_gets_out(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.lease_holder.lost = True
        assert isinstance(one.ended(), LeaseLost)
    assert one.events[-1].startswith("committed")


def _mirror_fails(one: World) -> None:
    one.qemu.jobs[mirror_job.name_of(0)]["io-status"] = "failed"


def _log_has_no_room(one: World) -> None:
    one.disk.control.failed = 28


def _nbdkit_ends(one: World) -> None:
    one.disk.control.process = 0


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (_mirror_fails, "an input/output error"),
        (_log_has_no_room, "No space left"),
        (_nbdkit_ends, "its nbdkit process is gone"),
    ],
)
def test_an_epoch_of_which_a_write_is_in_no_log_is_not_sealed(
    one: World, fails: Callable[[World], None], why: str
) -> None:
    with one.run():
        one.epochs(1)
        one.capturer.before = lambda _: fails(one)
        ended = one.ended()
        assert isinstance(ended, mirror_job.MirrorEnded)
        assert why in ended.message
    assert one.events[-1] == "captured"


def test_without_its_nbdkit_no_epoch_is_begun(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest would be paused for nothing, and QEMU could not save its state."""
    release = one.held.release

    def last() -> None:
        release()
        _nbdkit_ends(one)

    with one.run():
        one.epochs(1)
        monkeypatch.setattr(one.held, "release", last)
        assert isinstance(one.ended(), mirror_job.MirrorEnded)
    assert one.events[-1] != "captured"


def test_a_guest_that_has_ended_ends_it(one: World) -> None:
    with one.run():
        one.epochs(1)
        one.qemu.gone = True
        assert isinstance(one.ended(), HypervisorError)


@pytest.mark.parametrize("what", ["output", "writes", "a wish"])
def test_much_that_waits_ends_an_epoch_early(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_BUSY_LOG", 1000)
    with world(terms=RARELY) as one, one.run():
        one.epochs(1)
        count = one.capturer.count
        if what == "output":
            one.held.waiting = EARLY + 1
        elif what == "writes":
            one.disk.write(0, bytes(2000))
        else:
            one.requests.add(Request.PLANNED)
        until(lambda: one.capturer.count > count)


def test_nothing_that_waits_ends_no_epoch_early() -> None:
    with world(terms=RARELY) as one, one.run():
        one.epochs(1)
        one.held.waiting = EARLY
        one.requests.wait(Seconds(0.1))
        assert one.capturer.count == 1


@pytest.mark.parametrize(
    ("left", "waits"), [(1.0, 0.005), (0.005, 0.005), (0.002, 0.002), (0.0, 0.005), (-3.0, 0.005)]
)
def test_no_wait_for_a_message_delays_an_epoch_that_is_due(left: float, waits: float) -> None:
    assert loop.poll_interval(left) == waits


def test_a_new_agent_goes_on_with_what_the_backup_has(one: World) -> None:
    with one.run():
        one.epochs(2)
    committed = one.peer.seals[-1].epoch
    one.peer.bulk.clear()
    one.requests.drop(Request.END)
    one.memory.write(0, 30, 30)
    with one.run(begun=False, held=True, whole=True):
        one.epochs(1)
        assert one.follows()
    assert one.peer.hellos[-1].captured > 0
    assert one.peer.bulk == []
    numbers = [seal.epoch for seal in one.peer.seals]
    assert numbers[numbers.index(committed) + 1] == committed + 1


def test_a_new_agent_whose_mirrors_had_to_begin_again_begins_anew(one: World) -> None:
    with one.run():
        one.epochs(1)
    one.requests.drop(Request.END)
    with one.run(begun=True, held=True):
        one.epochs(1)
    assert one.peer.hellos[-1].captured == 0


def test_what_the_backup_tells_of_itself_is_shown(one: World) -> None:
    with one.run():
        one.epochs(2)
        until(lambda: one.status.as_json()["standby"] == {"committed": 1})


def test_packets_that_qemu_dropped_are_counted(one: World) -> None:
    with one.run():
        one.epochs(1)
        assert one.status.as_json()["packets_lost"] == 0
        one.held.lost = 7
        until(lambda: one.status.as_json()["packets_lost"] == 7)


def test_an_epoch_in_which_the_guest_was_resumed_is_taken_again(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = one.capturer.take

    def take(*, goes_on: bool = True) -> Epoch:
        epoch = taken(goes_on=goes_on)
        if one.capturer.count in (3, 4):
            failed = Resumed("web1 on alpha was resumed while it was captured")
            failed.found = epoch.changed
            raise failed
        return epoch

    def work(count: int) -> None:
        if count == 3:  # more than is kept aside of an epoch: the last copy has some already
            for number in range(35):
                one.memory.write(0, number, 77)

    monkeypatch.setattr(one.capturer, "take", take)
    one.capturer.before = work
    with one.run():
        one.epochs(5)
        assert one.follows()
        assert one.events.count("captured") >= one.events.count("released") + 2
    assert one.raised is None


def test_a_switch_in_which_the_guest_was_resumed_is_tried_again(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = one.capturer.take
    left = [1]

    def take(*, goes_on: bool = True) -> Epoch:
        epoch = taken(goes_on=goes_on)
        if not goes_on and left:
            failed = Resumed("web1 on alpha was resumed while it was captured")
            failed.found, _ = epoch.changed, left.pop()
            raise failed
        return epoch

    monkeypatch.setattr(one.capturer, "take", take)
    with one.run():
        one.epochs(2)
        one.requests.add(Request.PLANNED)
        assert isinstance(one.ended(), Switched)
    assert one.capturer.goes_on.count(False) == 2
    assert one.events.index("go on") < one.events.index("given away")
    assert one.follows()
