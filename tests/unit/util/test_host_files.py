"""Files in directories of another user: no link, FIFO or other file of theirs is followed."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from vmckpt.util import host_files
from vmckpt.util.host_files import FileRefused, Folder

THEM = 4321


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory of another user, in one of ours."""
    path = tmp_path / "place"
    path.mkdir()
    os.chown(path, THEM, THEM)
    return path


def link(path: Path, target: Path, owner: int = 0) -> Path:
    path.symlink_to(target)
    os.chown(path, owner, owner, follow_symlinks=False)
    return path


def read(file: int) -> bytes:
    with os.fdopen(file, "rb") as opened:
        return opened.read()


def test_what_is_written_is_new_whatever_was_there(place: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    link(place / "a", tmp_path / "secret", THEM)
    with Folder(place) as folder:
        with pytest.raises(FileExistsError) as caught:
            folder.create("a")
        assert caught.value.filename == str(place / "a")
        folder.write("a", b"ours")
        assert folder.read("a", 3) == b"our"
    assert (tmp_path / "secret").read_text() == "secret"
    assert not (place / "a").is_symlink()
    assert stat.S_IMODE((place / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "make",
    [lambda path: link(path, Path("/etc/passwd")), os.mkfifo, os.mkdir],
    ids=["link", "fifo", "directory"],
)
def test_only_a_regular_file_is_opened(place: Path, make: Callable[[Path], object]) -> None:
    make(place / "a")
    with Folder(place) as folder:
        with pytest.raises(FileRefused, match="is not a regular file") as caught:
            folder.open("a")
        assert str(place / "a") in (caught.value.hint or "")
        assert folder.look("a") is not None
        assert folder.look("b") is None


@pytest.mark.parametrize(("owner", "refused"), [(0, False), (THEM, True)])
def test_a_link_on_the_way_is_followed_only_if_it_is_ours(
    place: Path, tmp_path: Path, owner: int, refused: bool
) -> None:
    (place / "a").write_text("a")
    way = link(tmp_path / "way", place, owner)
    works: tuple[Callable[[], None], ...] = (
        lambda: Folder(way).close(), lambda: os.close(host_files.opened(way / "a")),
    )  # fmt: skip
    for work in works:
        if refused:
            with pytest.raises(FileRefused, match=f"symbolic link owned by user {THEM}: way"):
                work()
        else:
            work()


def test_a_link_of_ours_to_a_file_is_followed_and_a_circle_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    link(tmp_path / "b", Path("a"))
    assert read(host_files.opened(tmp_path / "b")) == b"a"
    link(tmp_path / "c", Path("d"))
    link(tmp_path / "d", Path("c"))
    with pytest.raises(FileRefused, match="has too many links"):
        host_files.opened(tmp_path / "c")


def test_a_directory_that_is_held_stays_the_one_that_was_opened(
    place: Path, tmp_path: Path
) -> None:
    (place / "a").write_text("before")
    with Folder(place) as folder:
        place.rename(tmp_path / "moved")
        link(place, Path("/etc"), THEM)
        assert folder.read("a", 10) == b"before"
        folder.rename("a", "b")
    assert (tmp_path / "moved" / "b").exists()


def test_missing_directories_are_made_only_where_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Folder(tmp_path / "a" / "b")
    Folder(tmp_path / "a" / "b", make=True).close()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o711


@pytest.mark.parametrize(
    ("mode", "owner", "last", "why"),
    [
        (0o755, 0, True, None), (0o755, THEM, False, f"belongs to user {THEM}"),
        (0o777, 0, False, "is writable by other users"), (0o1777, 0, False, None),
        (0o1777, 0, True, "is writable by other users"),
        (0o770, 0, True, "is writable by other users"),
    ],
)  # fmt: skip
def test_whoever_may_change_a_directory_is_told(
    tmp_path: Path, mode: int, owner: int, last: bool, why: str | None
) -> None:
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(mode)
    os.chown(path, owner, owner)
    assert host_files.others_may_change(path.stat(), last=last) == why


def test_no_file_becomes_a_program_by_what_was_there_before(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.touch()
    os.chown(before, THEM, THEM)
    before.chmod(0o4755)
    with after.open("wb") as file:
        host_files.as_before(file.fileno(), before.stat())
    seen = after.stat()
    assert (seen.st_uid, seen.st_gid, stat.S_IMODE(seen.st_mode)) == (THEM, THEM, 0o644)
