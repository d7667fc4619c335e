"""Small files that are there whole, or as they were before, also after a loss of power."""

import os
from pathlib import Path

import pytest

from vmckpt.util import atomic_file


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is brought to the disk, and when the name changes."""
    told: list[str] = []
    rename = Path.rename

    def fsync(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        size = f" of {path.stat().st_size} bytes" if path.is_file() else ""
        told.append(f"sync {path.relative_to(tmp_path)}{size}")

    def renamed(path: Path, target: Path) -> Path:
        told.append(f"rename {path.name} to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renamed)
    return told


def test_its_content_is_on_the_disk_before_it_has_its_name_and_then_the_name(
    tmp_path: Path, steps: list[str]
) -> None:
    atomic_file.put(tmp_path / "x", "text", for_good=True)
    assert steps == ["sync x.new of 4 bytes", "rename x.new to x", "sync ."]


def test_what_goes_with_the_host_waits_for_no_disk(tmp_path: Path, steps: list[str]) -> None:
    atomic_file.put(tmp_path / "x", "text")
    assert steps == ["rename x.new to x"]


def test_one_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "x"
    atomic_file.put(path, "before")
    with pytest.raises(UnicodeEncodeError):
        atomic_file.put(path, "begun" * 10_000 + "\udc80")
    assert path.read_text() == "before"


@pytest.mark.parametrize(("private", "mode"), [(True, 0o600), (False, 0o644)])
def test_a_private_one_is_for_us_alone(tmp_path: Path, private: bool, mode: int) -> None:
    mask = os.umask(0o022)
    try:
        atomic_file.put(tmp_path / "x", "text", private=private)
    finally:
        os.umask(mask)
    assert (tmp_path / "x").stat().st_mode & 0o777 == mode
