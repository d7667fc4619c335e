"""A protected guest that somebody has ended: who is told, and what is put back."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.backing import following
from tests.support.replicas import LEASE, SHORT, session
from vmckpt.agent.replication import mirrors, teardown
from vmckpt.capture import migration_settings
from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import RemoteError
from vmckpt.hypervisor import standby_domain as libvirt_side
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.lease.clock import boottime
from vmckpt.replication.primary import network_buffer
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.replication.session import ProtectionTerms
from vmckpt.replication.test_failover.pause import LoopPause
from vmckpt.replication.watchdog import process
from vmckpt.replication.watchdog.shared_page import WatchdogPage
from vmckpt.units import Seconds

SESSION = session(disks=())
UNDO = Undo(guest="u-1", capabilities={}, bandwidth=0, runs=True, folder="")


class Backup:
    """Hears a word at that try; None: never."""

    def __init__(self, hears_at: int | None) -> None:
        self.hears_at, self.tries = hears_at, 0

    def tell(self, *_: object) -> None:
        self.tries += 1
        if self.hears_at is None or self.tries < self.hears_at:
            raise RemoteError("no answer")


def ended(backup: Backup, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done about a guest that was ended by somebody's wish."""
    done: list[str] = []
    monkeypatch.setattr(mirrors, "end_all", lambda *_: None)
    monkeypatch.setattr(teardown, "_tell_backup", backup.tell)
    monkeypatch.setattr(teardown, "define", lambda _: done.append("defined"))
    monkeypatch.setattr(teardown, "forget", lambda *_: done.append("forgotten"))
    monkeypatch.setattr(teardown, "_HEARS", Seconds(0.2))
    monkeypatch.setattr(teardown, "_AGAIN", Seconds(0.01))

    teardown.guest_ended(SESSION, folder, wished=True)
    return done


@pytest.mark.parametrize("at", [1, 3])
def test_a_busy_backup_is_told_again(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = Backup(at)
    assert ended(backup, tmp_path, monkeypatch) == ["defined", "forgotten"]
    assert backup.tries == at


def test_while_nobody_knows_of_it_nothing_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = Backup(None)
    assert ended(backup, tmp_path, monkeypatch) == []
    assert backup.tries > 2


def test_a_backup_that_only_breathes_has_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    with following(monkeypatch) as one:
        one.standstill = LoopPause(SHORT)
        one.begin()
        us = session(disks=(), port=one.ends.server.getsockname()[1])
        monkeypatch.setattr(teardown, "_CONNECT", Seconds(0.5))
        with one.standstill.held(), pytest.raises(ConnectionLost):  # its heartbeats go on
            teardown._tell_backup(us, one.ends.primary, "the guest has stopped")
        monkeypatch.setattr(teardown, "_CONNECT", SHORT)
        teardown._tell_backup(us, one.ends.primary, "the guest has stopped")
        assert one.came() is None


@pytest.mark.parametrize(
    ("renewed", "ended"),
    [(-5.0, True), (-60.0, True), (-2.0, False), (None, False), (float("-inf"), True)],
)
def test_of_a_guest_whose_lease_ended_it_is_not_said_what_ended_it(
    tmp_path: Path, renewed: float | None, ended: bool
) -> None:
    """The kernel leaves no word. A QEMU that crashed with its agent dead looks the same."""
    page = WatchdogPage.create(tmp_path / process.PAGE, lasts=Seconds(4.0))
    page.renewed = 0.0 if renewed is None else boottime() + renewed
    page.close()
    why = teardown.watchdog_kill_reason(tmp_path)
    assert ("or QEMU died before the lease expired" in why if why is not None else False) is ended
    (tmp_path / process.KILLED).write_text("2026-11-01T00:00:00Z the lease was lost\n")
    assert (
        teardown.watchdog_kill_reason(tmp_path)
        == "the watchdog killed the guest: the lease was lost"
    )
    assert teardown.watchdog_kill_reason(tmp_path / "none") is None


class Store:
    """A lease store; notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def hand_over(self, token: int, to: str) -> int:
        self.asked.append(f"hand over {token} to {to}")
        return token + 1


@pytest.mark.parametrize(
    ("runs", "asked"), [(False, ["hand over 3 to beta"]), (True, [])], ids=["dead", "alive"]
)
def test_only_a_guest_that_is_dead_for_sure_is_handed_to_its_standby(
    runs: bool, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the standby would run beside it at once, without waiting for the end of the lease."""
    store = Store()
    monkeypatch.setattr(mirrors, "end_all", lambda *_: None)
    monkeypatch.setattr(teardown, "lease", lambda _: nullcontext(store))
    monkeypatch.setattr(identity, "runs", lambda _: runs)
    (tmp_path / "token").write_text("3")
    terms = ProtectionTerms(interval=None, automatic=True)

    teardown.guest_ended(session(lease=LEASE, terms=terms, disks=()), tmp_path, wished=False)
    assert store.asked == asked


def test_output_is_let_out_only_once_no_standby_may_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby that went on from its last epoch would have forgotten what was let out."""
    done: list[str] = []

    class LeaseHolder:
        def invalidate(self) -> None:
            done.append("invalidated")

        def release(self) -> None:
            done.append("released")

    for module, name in (
        (network_buffer, "remove"), (migration_settings, "break_off"), (mirrors, "end_all"),
        (teardown, "forget"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, name=name: done.append(name))
    monkeypatch.setattr(libvirt_side, "stored", lambda _: ("<domain/>", False))
    us = session(undo=UNDO.to_json(), disks=())

    teardown.unprotect(us, tmp_path, cast("Any", None), cast("Any", LeaseHolder()))
    assert done == ["invalidated", "remove", "break_off", "end_all", "released", "forget"]


def test_output_is_not_let_out_where_that_cannot_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LeaseHolder:
        def invalidate(self) -> None:
            raise RemoteError("the lease store is silent")

    done: list[str] = []
    monkeypatch.setattr(network_buffer, "remove", lambda *_: done.append("remove"))

    with pytest.raises(RemoteError, match="silent"):
        teardown.unprotect(SESSION, tmp_path, cast("Any", None), cast("Any", LeaseHolder()))
    assert done == []
