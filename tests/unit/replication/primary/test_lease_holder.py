"""The primary's hold on its guest, with a witness that keeps to its rules and may be silent."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.replicas import until
from tests.support.staging import in_memory
from tests.support.witnesses import Witness
from vmckpt.errors import LeaseLost, VmckptError
from vmckpt.lease.clock import boottime
from vmckpt.lease.connection import LeaseUnreachable
from vmckpt.replication.primary import lease_holder as lease_holders
from vmckpt.replication.primary.lease_holder import LeaseHolder
from vmckpt.replication.protocol.messages import Heartbeat
from vmckpt.replication.session import Lease
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds
from vmckpt.util import atomic_file

LASTS = Seconds(5.0)
LOST = float("-inf")


@dataclass
class Wire:
    """A line of which only what is sent matters."""

    sent: list[Heartbeat] = field(default_factory=list)

    def send(self, message: Heartbeat) -> None:
        self.sent.append(message)


@dataclass
class Kernel:
    """The timer inside QEMU."""

    ends: float | None = None
    fails: bool = False

    def armed(self) -> bool:
        return self.ends is not None

    def arm(self, ends: float) -> None:
        if self.fails:
            raise VmckptError("its main thread does not stop")
        self.ends = ends

    def disarm(self) -> None:
        if self.fails:
            raise VmckptError("its main thread does not stop")
        self.ends = None


class World:
    """An agent's folder and page; `tenure` makes one agent's, the next one's, ..."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.witness = folder, Witness()
        self.page = WatchdogPage.create(folder / "page", lasts=LASTS)
        self.page.guarded = boottime() + 3600
        terms = SimpleNamespace(every=Seconds(0.01), lasts=LASTS, limit=Seconds(0.1))
        self.lease: Lease | None = cast("Lease", SimpleNamespace(url="", terms=terms))
        self.lives = True
        self.guards = 0
        self.starting: Callable[[], object] = lambda: None
        self.kernel = Kernel()

    def lease_holder(self, holder: str = "alpha") -> LeaseHolder:
        def again() -> None:
            self.guards += 1
            self.starting()
            self.page.guarded = boottime() + 3600

        return LeaseHolder(
            self.lease, self.folder, self.page, holder=holder, note=lambda: {"phase": "copying"},
            lives=lambda: self.lives, restart_watchdog=again, enforcer=self.kernel,
        )  # fmt: skip

    def stored(self) -> int:
        return int((self.folder / "token").read_text())

    def renewals(self, more: int = 3) -> None:
        """Wait for so many more."""
        wanted = self.witness.count("renew") + more
        until(lambda: self.witness.count("renew") >= wanted)


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(lease_holders, "BEAT", Seconds(0.01))
    monkeypatch.setattr(lease_holders, "_AGAIN", Seconds(0.01))
    with in_memory() as folder:
        made = World(folder)
        monkeypatch.setattr(lease_holders, "LeaseClient", made.witness.client)
        yield made
        for thread in threading.enumerate():  # one that starts a guard writes into the page
            if thread.name == "watchdog":
                thread.join()
        made.page.close()


def test_the_first_agent_takes_the_lease_and_notes_its_token(one: World) -> None:
    with one.lease_holder() as lease_holder:
        assert (lease_holder.token, one.stored()) == (2, 2)
    assert one.witness.asked[:2] == ["acquire", "renew 2"]
    assert lease_holder.acquired


def test_the_next_agent_goes_on_with_that_token(one: World) -> None:
    with one.lease_holder():
        pass
    with one.lease_holder() as lease_holder:
        assert lease_holder.token == 2
        assert not lease_holder.acquired
    assert one.witness.count("acquire") == 1


def test_the_lease_is_renewed_as_long_as_it_lasts_and_not_longer(one: World) -> None:
    with one.lease_holder():
        one.renewals()
    count = len(one.witness.asked)
    time.sleep(0.03)
    assert len(one.witness.asked) == count


def test_the_guard_enforces_nothing_before_a_standby_may_take_over(one: World) -> None:
    with one.lease_holder() as lease_holder:
        one.renewals()
        assert one.page.renewed == 0.0
        before = boottime()
        lease_holder.validate()
        assert one.witness.state == "protected"
        assert one.page.renewed >= before
        noted = one.page.renewed
        one.renewals()
        assert one.page.renewed > noted
        lease_holder.invalidate()
        one.renewals()
        assert one.page.renewed == 0.0


def test_a_renewal_comes_before_the_standby_is_declared_valid(one: World) -> None:
    """Else the guard could count from one that is old."""
    with one.lease_holder() as lease_holder:
        one.witness.asked.clear()
        lease_holder.validate()
        at = one.witness.asked.index("validate 2")
        assert "renew 2" in one.witness.asked[:at]


def test_all_that_ends_the_guest_is_armed_before_the_witness_calls_the_standby_valid(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that died in between would leave a guest that another may run, and nothing ends."""
    seen: list[tuple[float, float | None]] = []
    with one.lease_holder() as lease_holder:
        client = lease_holder._client
        assert client is not None
        validate = client.validate

        def looked(token: int) -> None:
            seen.append((one.page.renewed, one.kernel.ends))
            validate(token)

        monkeypatch.setattr(client, "validate", looked)
        before = boottime()
        lease_holder.validate()
    assert seen[0][0] >= before
    assert seen[0][1] == pytest.approx(seen[0][0] + LASTS)


def test_without_the_timer_a_standby_is_not_declared_valid(one: World) -> None:
    with one.lease_holder() as lease_holder:
        one.kernel.fails = True
        with pytest.raises(VmckptError, match="does not stop"):
            lease_holder.validate()
        assert one.witness.count("validate 2") == 0


def test_the_timer_goes_with_each_renewal_and_ends_with_the_standby(one: World) -> None:
    with one.lease_holder() as lease_holder:
        one.renewals()
        assert not one.kernel.armed()
        lease_holder.validate()
        first = one.kernel.ends
        assert first is not None
        until(lambda: (one.kernel.ends or 0.0) > first)
        lease_holder.invalidate()
        one.renewals()
        assert not one.kernel.armed()


def test_a_timer_that_could_not_be_removed_is_removed_with_a_later_renewal(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        one.kernel.fails = True
        with pytest.raises(VmckptError, match="does not stop"):
            lease_holder.invalidate()
        one.kernel.fails = False
        until(lambda: one.kernel.ends is None)
        assert one.witness.state != "protected"


def test_the_next_agent_removes_a_timer_that_nothing_needs(one: World) -> None:
    with one.lease_holder():
        pass
    one.kernel.ends = boottime() + 3600
    with one.lease_holder():
        assert one.kernel.ends is None


def test_a_lost_lease_ends_the_guest_and_the_renewals(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        lease_holder.check()
        one.witness.holder = "beta"
        until(lambda: one.page.renewed == LOST)
        with pytest.raises(LeaseLost, match="the lease is lost"):
            lease_holder.check()
        count = one.witness.count("renew")
        time.sleep(0.05)
        assert one.witness.count("renew") == count


def test_a_witness_that_forgot_an_invalidation_ends_no_guest(one: World) -> None:
    """It was failed over to a replica that lacked it; the standby is as worthless as it was."""
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        fail_over = one.witness.backup()
        lease_holder.invalidate()
        assert lease_holder.token == 3
        fail_over()
        assert (one.witness.token, one.witness.state) == (2, "protected")
        until(lambda: one.witness.token == 4)
        one.renewals()
        assert (one.witness.state, lease_holder.token, one.stored()) == ("held", 4, 4)
        assert lease_holder.lost is None
        assert one.page.renewed == 0
        lease_holder.check()


def test_a_witness_that_forgot_a_valid_standby_is_told_again(one: World) -> None:
    with one.lease_holder() as lease_holder:
        fail_over = one.witness.backup()
        lease_holder.validate()
        one.renewals()
        assert lease_holder.validated
        fail_over()
        until(lambda: not lease_holder.validated)
        assert one.page.renewed > 0  # who knows what else knows of it
        lease_holder.validate()
        one.renewals()
        assert lease_holder.validated


def test_a_witness_that_forgot_the_token_is_told_that_the_standby_is_invalid(one: World) -> None:
    """Also where the first that it hears since is that."""
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        fail_over = one.witness.backup()
        lease_holder.invalidate()
        lease_holder.validate()
        with lease_holder._tokens:
            fail_over()
            lease_holder.invalidate()
        assert (one.witness.state, one.witness.token, lease_holder.token) == ("held", 4, 4)
        assert lease_holder.lost is None


def test_the_next_agent_of_a_witness_that_forgot_makes_its_standby_anew(one: World) -> None:
    with one.lease_holder() as lease_holder:
        fail_over = one.witness.backup()
        lease_holder.invalidate()
        lease_holder.validate()
    fail_over()
    with one.lease_holder() as lease_holder:
        assert lease_holder.acquired
        assert (lease_holder.token, one.witness.state) == (4, "held")


def test_a_witness_that_is_silent_for_a_moment_is_borne(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        one.witness.down = True
        one.renewals()
        lease_holder.check()
        assert lease_holder.lost is None
        one.witness.down = False
        noted = one.page.renewed
        one.renewals()
        until(lambda: one.page.renewed > noted)


def test_what_was_not_renewed_in_time_lets_nothing_out(one: World) -> None:
    assert one.lease is not None
    one.lease.terms.lasts = Seconds(0.05)  # type: ignore[misc]
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        lease_holder.check()
        one.witness.down = True
        time.sleep(0.1)
        with pytest.raises(LeaseLost, match="not renewed in time"):
            lease_holder.check()


@pytest.mark.parametrize(("ago", "out"), [(LASTS - 0.5, True), (LASTS + 0.01, False)])
def test_output_ends_with_the_lease_and_not_when_others_may_begin(
    one: World, ago: float, out: bool
) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        one.witness.down = True
        one.renewals()
        lease_holder._renewed = boottime() - ago
        with nullcontext() if out else pytest.raises(LeaseLost, match="not renewed in time"):
            lease_holder.check()


def test_while_work_hangs_nothing_is_renewed(one: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_holders, "HUNG", Seconds(0.03))
    with one.lease_holder() as lease_holder:
        with lease_holder.busy():
            time.sleep(0.06)
            count = one.witness.count("renew")
            time.sleep(0.06)
            assert one.witness.count("renew") <= count + 1
        one.renewals()


def test_short_work_keeps_nothing_from_being_renewed(one: World) -> None:
    with one.lease_holder() as lease_holder, lease_holder.busy():
        one.renewals()


def test_a_guest_that_is_gone_keeps_nobody_from_running_it(one: World) -> None:
    with one.lease_holder():
        one.renewals()
        one.lives = False
        time.sleep(0.05)
        count = one.witness.count("renew")
        time.sleep(0.05)
        assert one.witness.count("renew") == count


@pytest.mark.parametrize("how", ["down", "dumb"])
def test_an_invalidation_without_an_answer_is_repeated_before_anything_else(
    one: World, how: str
) -> None:
    with one.lease_holder() as lease_holder:
        one.renewals()
        setattr(one.witness, how, True)
        with pytest.raises(LeaseUnreachable):
            lease_holder.invalidate()
        begun = one.witness.asked.index("invalidate 2")
        until(lambda: one.witness.count("invalidate") >= 3)
        assert one.stored() == 2
        setattr(one.witness, how, False)
        until(lambda: lease_holder.token == 3)
        one.renewals()
        assert lease_holder.lost is None
    asked = one.witness.asked[begun:]
    first = asked.index("renew 3")
    assert set(asked[:first]) == {"invalidate 2"}
    assert "renew 2" not in asked
    assert one.stored() == 3


def test_an_agent_that_died_over_a_change_is_followed_by_one_that_asks(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
    one.witness.dumb = True
    with pytest.raises(LeaseUnreachable):
        lease_holder.invalidate()
    one.witness.dumb = False
    assert (one.witness.token, one.stored()) == (3, 2)
    with one.lease_holder() as new:
        assert (new.token, one.stored()) == (4, 4)
        assert (new.acquired, new.lost) == (True, None)
        one.renewals()
        assert one.page.renewed == 0.0
    with one.lease_holder() as third:
        assert (third.token, third.acquired) == (4, False)


def test_an_agent_that_died_over_a_change_may_have_sent_it(one: World) -> None:
    """It may arrive yet, and would void the token with which the next agent goes on."""
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
    one.witness.down = True
    with pytest.raises(LeaseUnreachable):
        lease_holder.invalidate()
    one.witness.down = False
    with one.lease_holder() as new:
        assert (new.token, new.acquired) == (3, True)
        assert one.witness.state == "held"
        with pytest.raises(LeaseLost):  # now it arrives
            lease_holder.invalidate()
        one.renewals()
        assert new.lost is None


def test_a_new_agent_whose_guest_is_another_s_ends_it(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
    one.witness.change("take over", "beta", "held")
    with pytest.raises(LeaseLost), one.lease_holder():
        pass
    assert one.page.renewed == LOST


def test_a_new_agent_does_not_begin_without_the_witness(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
    noted = one.page.renewed
    one.witness.down = True
    with pytest.raises(LeaseUnreachable), one.lease_holder():
        pass
    assert one.page.renewed == noted


def test_a_guest_is_handed_over_once_there_is_an_answer(one: World) -> None:
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        one.witness.down = True
        giver = threading.Thread(target=lease_holder.transfer, args=("beta",), daemon=True)
        giver.start()
        until(lambda: one.witness.count("hand over 2") >= 2)
        assert giver.is_alive()
        one.witness.down = False
        giver.join(5.0)
        assert not giver.is_alive()
        assert one.witness.holder == "beta"


def test_what_is_not_ours_cannot_be_handed_over(one: World) -> None:
    with one.lease_holder() as lease_holder:
        one.witness.change("take over", "gamma", "held")
        with pytest.raises(LeaseLost):
            lease_holder.transfer("beta")
        assert one.witness.holder == "gamma"


def test_what_has_ended_is_given_back(one: World) -> None:
    with one.lease_holder() as lease_holder:
        pass
    lease_holder.release()
    assert one.witness.holder == ""


def test_beats_tell_the_guard_and_the_other_end_that_we_live(one: World) -> None:
    with one.lease_holder() as lease_holder:
        until(lambda: one.page.beats > 2)
        wire = Wire()
        lease_holder.line = cast("Any", wire)
        until(lambda: len(wire.sent) > 2)
        lease_holder.line = None
    assert wire.sent[0].note == b'{"phase": "copying"}'
    assert abs(wire.sent[0].sent - time.time()) < 60


def test_a_guard_that_does_not_look_any_more_is_started_again(one: World) -> None:
    with one.lease_holder():
        one.renewals()
        assert one.guards == 0
        one.page.guarded = boottime() - 2
        until(lambda: one.guards == 1)


def test_the_lease_is_renewed_while_a_guard_is_started_again(one: World) -> None:
    """On a busy host that took longer than the lease lasts, which ended the guest."""
    starts = threading.Event()
    one.starting = lambda: starts.wait(5.0)
    with one.lease_holder():
        one.page.guarded = boottime() - 2
        until(lambda: one.guards == 1)
        one.renewals(20)
        assert one.guards == 1  # and no second one meanwhile
        starts.set()


def test_the_lease_is_renewed_though_no_guard_can_be_started(one: World) -> None:
    def refuse() -> None:
        raise VmckptError("no more processes")

    one.starting = refuse
    with one.lease_holder():
        one.page.guarded = boottime() - 2
        until(lambda: one.guards >= 3)
        one.renewals(20)


def test_without_a_lease_store_there_is_one_token_and_nobody_is_asked(one: World) -> None:
    one.lease = None
    with one.lease_holder() as lease_holder:
        assert lease_holder.token == 1
        lease_holder.validate()
        lease_holder.check()
        lease_holder.invalidate()
        lease_holder.transfer("beta")
        lease_holder.release()
        until(lambda: one.page.beats > 1)
    assert one.witness.asked == []
    assert one.page.renewed == 0.0
    assert os.listdir(one.folder) == ["page"]  # noqa: PTH208


def test_a_full_tmpfs_ends_no_guest_whose_standby_is_worthless(
    one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The witness knows that nobody may take over; the guard must, too."""
    room = [True]
    put = atomic_file.put

    def full(path: Path, data: str, **more: Any) -> None:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(path, data, **more)

    monkeypatch.setattr(atomic_file, "put", full)
    with one.lease_holder() as lease_holder:
        lease_holder.validate()
        assert one.page.renewed
        room[0] = False
        lease_holder.invalidate()
        assert one.page.renewed == 0.0
        assert one.stored() < lease_holder.token
        one.renewals()
        assert lease_holder.lost is None
    with one.lease_holder() as again:  # the file still has no room
        assert one.page.renewed == 0.0
        assert again.acquired
        assert one.stored() < again.token
        one.renewals()
        again.check()
