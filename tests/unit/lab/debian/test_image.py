"""The cached file system of Debian guests: what it is made of, and what is said if it fails."""

from pathlib import Path

import pytest

from vmckpt.errors import LabError
from vmckpt_lab import plan
from vmckpt_lab.debian import image

UNREACHABLE = "http://127.0.0.1:9/debian"


def test_another_package_or_script_makes_another_image() -> None:
    made_of = image.recipe()
    assert "postgresql" in made_of
    assert "pgbench" in made_of
    assert image.key(made_of) == image.key(image.recipe())
    assert image.key(made_of + " ") != image.key(made_of)


def test_a_cached_image_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CACHE", tmp_path)
    folder = tmp_path / "debian" / image.key(image.recipe())
    folder.mkdir(parents=True)
    said: list[str] = []
    assert image.prepare(said.append).disk == folder / "disk.qcow2"
    assert said == []


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CACHE", tmp_path)
    monkeypatch.setattr(image, "mirror", lambda: UNREACHABLE)
    said: list[str] = []
    with pytest.raises(LabError) as failed:
        image.prepare(said.append)
    assert failed.value.message.startswith("the Debian packages could not be fetched: E: ")
    assert "\n" not in failed.value.message
    assert str(tmp_path / "debian/failed.log") in (failed.value.hint or "")
    assert UNREACHABLE in (tmp_path / "debian/failed.log").read_text()
    left = {one.name for one in (tmp_path / "debian").iterdir()}
    assert left == {".lock", "failed.log"}
    assert "building the image" in said[0]


def test_missing_tools_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CACHE", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LabError, match="debootstrap and virt-install must be installed"):
        image.prepare()


def test_the_mirror_is_the_one_that_apt_uses() -> None:
    assert image.mirror().startswith(("http://", "https://"))
    assert not image.mirror().endswith("/")
