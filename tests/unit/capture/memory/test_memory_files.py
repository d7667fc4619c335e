"""Copies of a guest's memory: where they are kept, and when they go."""

import subprocess
import time
from pathlib import Path

import pytest

from vmckpt.capture.memory import memory_files
from vmckpt.util import host_directories

UUID = "3e6f1c52-0000-4000-8000-000000000001"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies are kept, as long as the test lasts."""
    monkeypatch.setattr(host_directories, "RUN", tmp_path / "run")
    monkeypatch.setattr(host_directories, "SHM", tmp_path)
    return memory_files.root()


def test_a_copy_goes_with_its_process(root: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        folder = memory_files.place(UUID, process.pid)
        memory_files.watch(folder, process.pid)
        folder.mkdir()
        memory_files.sweep()
        assert folder.is_dir()
        process.kill()
    give_up = time.monotonic() + 20
    while any(root.iterdir()):
        assert time.monotonic() < give_up, list(root.iterdir())
        time.sleep(0.05)


def test_what_nobody_watches_is_swept_unless_it_is_still_stored(root: Path) -> None:
    folder = root / f"{UUID}-1-77"  # no process of that number began then
    folder.mkdir()
    (root / "not ours").mkdir()
    with memory_files._locked(folder):
        memory_files.sweep()
        assert folder.exists()
    memory_files.sweep()
    assert [one.name for one in root.iterdir()] == ["not ours"]
