"""How much room a backup's epochs take, and what becomes of them without."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.staging import EMPTY, Standby, epoch, in_memory, restarted, run
from vmckpt.replication.backup import redo_log
from vmckpt.replication.backup.epoch_stage import WRITES
from vmckpt.replication.backup.redo_log import BODY, StageFull

FIRST = epoch(1, EMPTY)
SECOND = epoch(2, FIRST.after)


@pytest.fixture
def standby() -> Iterator[Standby]:
    with in_memory() as folder:
        yield Standby(folder, folder)


def test_a_large_epoch_does_not_keep_its_room(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo_log, "_KEPT", 4096)
    with standby.stage() as stage:
        run(stage, FIRST)
        assert (standby.folder / "pages").stat().st_size == 4096
        assert (standby.log / WRITES).stat().st_size <= BODY + 4096
        run(stage, SECOND)
    assert restarted(standby) == (2, SECOND.after)


def test_without_room_for_epochs_no_first_copy_is_begun(
    standby: Standby, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a guest would be copied over and over, and its output held each time."""
    full: set[Path] = set()
    allocate = os.posix_fallocate

    def room(file: int, begin: int, length: int) -> None:
        if Path(f"/proc/self/fd/{file}").readlink().parent in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, begin, length)

    monkeypatch.setattr(os, "posix_fallocate", room)
    with standby.stage() as stage:
        run(stage, FIRST)
        for folder in (standby.folder, standby.log):
            full.add(folder)
            with pytest.raises(
                StageFull, match=f"reserving space for epochs in {folder}: No space left"
            ):
                stage.start_over()
            assert stage.committed == 0
            full.clear()
        stage.start_over()
        run(stage, FIRST)
        assert all(one.stat().st_size < 1 << 20 for one in standby.folder.iterdir())
