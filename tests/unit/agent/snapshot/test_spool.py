"""One agent at a time at a snapshot."""

import threading
import time
from pathlib import Path

import pytest

from vmckpt.agent.snapshot import spool
from vmckpt.errors import GuestLocked
from vmckpt.units import Seconds


def test_the_second_one_waits_or_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "spool" / "s-1"
    with (
        spool.held(folder, patience=Seconds(0.0)),
        pytest.raises(GuestLocked, match="s-1 is locked by another agent"),
        spool.held(folder, patience=Seconds(0.2)),
    ):
        pass
    with spool.held(folder, patience=Seconds(0.0)):
        pass
    assert list(folder.parent.iterdir()) == []


def test_never_two_at_once(tmp_path: Path) -> None:
    folder, inside = tmp_path / "s-1", threading.Lock()
    seen: list[bool] = []

    def work() -> None:
        for _ in range(30):
            with spool.held(folder, patience=Seconds(30.0)):
                seen.append(inside.acquire(blocking=False))
                time.sleep(0.0005)
                if seen[-1]:
                    inside.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == [True] * 120


def test_a_lock_that_lost_its_name_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s-1"
    locked = spool._locked
    took: list[int] = []

    def slow(file: int) -> bool:
        """Somebody else gives the lock back between our opening and our locking."""
        if not took:
            folder.with_suffix(".lock").unlink()
        took.append(file)
        return locked(file)

    monkeypatch.setattr(spool, "_locked", slow)
    with spool.held(folder, patience=Seconds(5.0)):
        assert len(took) == 2
        assert folder.with_suffix(".lock").exists()
