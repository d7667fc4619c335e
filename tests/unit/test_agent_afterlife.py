"""A protected guest that somebody has ended: who is told, and what is put back."""

from pathlib import Path

import pytest

from tests.unit.backing import following
from tests.unit.replicas import SHORT, session
from vmckpt.agent import afterlife, writes
from vmckpt.errors import RemoteError
from vmckpt.lease.clock import boottime
from vmckpt.replicate import guard
from vmckpt.replicate.guardpage import GuardPage
from vmckpt.replicate.link import Cut
from vmckpt.replicate.standstill import Standstill
from vmckpt.units import Seconds

SESSION = session(disks=())


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
    monkeypatch.setattr(writes, "end_all", lambda *_: None)
    monkeypatch.setattr(afterlife, "_tell_backup", backup.tell)
    monkeypatch.setattr(afterlife, "define", lambda _: done.append("defined"))
    monkeypatch.setattr(afterlife, "forget", lambda *_: done.append("forgotten"))
    monkeypatch.setattr(afterlife, "_HEARS", Seconds(0.2))
    monkeypatch.setattr(afterlife, "_AGAIN", Seconds(0.01))

    afterlife.guest_ended(SESSION, folder, wished=True)
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
        one.standstill = Standstill(SHORT)
        one.begin()
        us = session(disks=(), port=one.ends.server.getsockname()[1])
        monkeypatch.setattr(afterlife, "_CONNECT", Seconds(0.5))
        with one.standstill.held(), pytest.raises(Cut):  # its heartbeats go on
            afterlife._tell_backup(us, one.ends.primary, "the guest has ended")
        monkeypatch.setattr(afterlife, "_CONNECT", SHORT)
        afterlife._tell_backup(us, one.ends.primary, "the guest has ended")
        assert one.came() is None


@pytest.mark.parametrize(
    ("renewed", "ended"),
    [(-5.0, True), (-60.0, True), (-2.0, False), (None, False), (float("-inf"), True)],
)
def test_of_a_guest_whose_lease_ended_it_is_not_said_what_ended_it(
    tmp_path: Path, renewed: float | None, ended: bool
) -> None:
    """The kernel leaves no word. A QEMU that crashed with its agent dead looks the same."""
    page = GuardPage.create(tmp_path / guard.PAGE, lasts=Seconds(4.0))
    page.renewed = 0.0 if renewed is None else boottime() + renewed
    page.close()
    why = afterlife.shot(tmp_path)
    assert ("which is unknown" in why if why is not None else False) is ended
    (tmp_path / guard.KILLED).write_text("2026-11-01T00:00:00Z the lease was lost\n")
    assert afterlife.shot(tmp_path) == "the guard ended the guest: the lease was lost"
    assert afterlife.shot(tmp_path / "none") is None
