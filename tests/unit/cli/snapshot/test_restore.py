"""vmckpt snapshot restore: what is said of a guest that is back, and what is refused."""

from dataclasses import replace

import pytest

from tests.support.restored import RESTORED
from tests.support.stocking import Stock, stock
from vmckpt.cli.snapshot import restore as cli_snapshot_restore

__all__ = ["stock"]


def test_a_guest_that_is_paused_is_not_told_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    cli_snapshot_restore._show(RESTORED, paused=True)
    cli_snapshot_restore._show(RESTORED, paused=False)
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert ("is restored and paused" in first, "web1 is running on alpha" in second) == (True, True)


def test_one_without_memory_is_off_and_one_whose_disks_come_in_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli_snapshot_restore._show(replace(RESTORED, runs=False), paused=False)
    told = capsys.readouterr()
    assert (
        "web1 is defined on alpha and is off, because the snapshot contains no memory" in told.out
    )
    lazy = replace(RESTORED, whole=False, warnings=("its cards are other ones",))
    cli_snapshot_restore._show(lazy, paused=False)
    told = capsys.readouterr()
    assert told.err.splitlines()[0] == "warning: its cards are other ones"
    assert "web1's memory and disks are being copied in the background" in told.err


def test_what_is_for_one_guest_is_refused_for_a_group(stock: Stock) -> None:
    code, _, wrong = stock("restore", "g-uq6nkk3ydjr4zqhe", "--as", "twin")
    assert code == 2
    assert "--as is not available for a group, and g-uq6nkk3ydjr4zqhe is a group" in wrong
    code, _, wrong = stock("restore", "g-uq6nkk3ydjr4zqhe")
    assert (code, "no store has the complete group g-uq6nkk3ydjr4zqhe" in wrong) == (45, True)


def test_a_base_image_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    kept = replace(RESTORED, bases={"vda": "/srv/vm/debian.qcow2"}, runs=False)
    cli_snapshot_restore._show(kept, paused=False)
    assert "disk vda is an overlay of /srv/vm/debian.qcow2" in capsys.readouterr().out


def test_links_that_stay_down_are_an_error(stock: Stock, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the network cards of fork may still have the original's MAC addresses"

    async def restored(*_: object) -> object:
        return replace(RESTORED, guest="fork", links_down=why)

    monkeypatch.setattr(cli_snapshot_restore, "_restore", restored)
    code, out, wrong = stock("restore", RESTORED.snapshot, "--as", "fork", "--link")
    assert (code, "fork is running on alpha" in out, why in wrong) == (24, True, True)
