"""Directories on a host where root may keep what it relies on."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vmckpt.errors import RemoteError
from vmckpt.util import host_directories

NOBODY = 65534


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like /run and /dev/shm of a host."""
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o1777)
    monkeypatch.setattr(host_directories, "RUN", tmp_path / "run")
    monkeypatch.setattr(host_directories, "SHM", tmp_path / "shm")


def test_they_are_ours_and_qemu_may_pass() -> None:
    made = host_directories.run_dir("replication", "u-1")
    assert [one.stat().st_mode & 0o7777 for one in (made, made.parent, host_directories.RUN)] == [
        0o711
    ] * 3
    assert host_directories.run_dir("replication", "u-1") == made


def test_memory_is_elsewhere_and_always_in_the_same_place() -> None:
    memory = host_directories.memory_dir("snapshots")
    assert memory.parent.parent == host_directories.SHM
    assert [one.stat().st_mode & 0o7777 for one in (memory, memory.parent)] == [0o700] * 2
    assert host_directories.memory_dir("snapshots") == memory
    shutil.rmtree(memory.parent)
    again = host_directories.memory_dir("snapshots")
    assert again != memory
    assert again.is_dir()


def _give_away(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def _open_up(path: Path) -> None:
    path.chmod(0o777)


def _link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def _replace_by_file(path: Path) -> None:
    path.rmdir()
    path.touch()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_give_away, "belongs to user 65534"),
        (_open_up, "is writable by other users"),
        (_link, "is not a directory"),
    ],
)
@pytest.mark.parametrize("which", [".", "replication", "replication/u-1"])
def test_what_others_made_or_may_change_is_refused(
    spoil: Callable[[Path], None], why: str, which: str
) -> None:
    host_directories.run_dir("replication", "u-1")
    spoil(host_directories.RUN / which)
    with pytest.raises(RemoteError, match=f"{why}, so it is not safe for files") as caught:
        host_directories.run_dir("replication", "u-1")
    assert "ls -ld" in str(caught.value)


def test_a_file_or_a_fifo_in_its_place_is_refused() -> None:
    _replace_by_file(host_directories.run_dir("replication"))
    with pytest.raises(RemoteError, match="is not a directory"):
        host_directories.run_dir("replication")
    (host_directories.RUN / "replication").unlink()
    os.mkfifo(host_directories.RUN / "replication")
    with pytest.raises(RemoteError, match="is not a directory"):
        host_directories.run_dir("replication")


def test_memory_that_was_given_away_is_refused() -> None:
    _give_away(host_directories.memory_dir("snapshots").parent)
    with pytest.raises(RemoteError, match="belongs to user 65534"):
        host_directories.memory_dir("snapshots")


def test_it_can_be_checked_before_anything_is_begun() -> None:
    host_directories.require_own_directory()
    assert not host_directories.RUN.exists()
    host_directories.run_dir()
    host_directories.require_own_directory()
    _open_up(host_directories.RUN)
    with pytest.raises(RemoteError, match="is writable by other users"):
        host_directories.require_own_directory()


def test_a_parent_that_others_may_write_must_be_sticky(tmp_path: Path) -> None:
    host_directories.run_dir()
    tmp_path.chmod(0o777)
    with pytest.raises(RemoteError, match="is writable by other users"):
        host_directories.run_dir()
    tmp_path.chmod(0o1777)
    assert host_directories.run_dir() == host_directories.RUN


def test_nothing_is_made_in_what_another_user_made() -> None:
    host_directories.RUN.mkdir()
    _give_away(host_directories.RUN)
    with pytest.raises(RemoteError, match="belongs to user 65534"):
        host_directories.run_dir("replication", "u-1")
    assert list(host_directories.RUN.iterdir()) == []
