"""A file takes another one's place in one go, and what was there before is not lost."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.agent.restore import replace_file
from vmckpt.agent.restore.replace_file import Replacement
from vmckpt.errors import BadInput

ID = "s-aaaaaaaaaaaaaaaa"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where a file is to be, with one from before."""
    path = tmp_path / "vda"
    path.write_text("before")
    return path


@pytest.fixture
def made(place: Path) -> Iterator[Replacement]:
    """A new file beside it."""
    one = Replacement(place, ID)
    os.write(one.create(), b"restored")
    yield one
    one.close()


def contents(place: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in place.parent.iterdir()}


def test_it_is_beside_its_place_until_it_is_swapped_and_then_the_old_one_is(
    place: Path, made: Replacement
) -> None:
    new, old = replace_file.paths(place, ID)
    assert contents(place) == {"vda": "before", new.name: "restored"}
    made.swap()
    assert contents(place) == {"vda": "restored", old.name: "before"}
    made.keep()
    assert contents(place) == {"vda": "restored"}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_what_is_taken_back_leaves_all_as_it_was(
    place: Path, made: Replacement, swapped: bool, there: bool
) -> None:
    if not there:
        place.unlink()
    if swapped:
        made.swap()
    made.take_back()
    made.take_back()
    assert contents(place) == ({"vda": "before"} if there else {})


def test_it_has_the_owner_of_the_one_before_or_else_the_one_that_was_said(
    place: Path, made: Replacement
) -> None:
    os.chown(place, 1234, 1234)
    place.chmod(0o640)
    made.swap((77, 77))
    seen = place.stat()
    assert (seen.st_uid, seen.st_gid, seen.st_mode & 0o777) == (1234, 1234, 0o640)

    other = Replacement(place.with_name("vdb"), ID)
    other.create()
    other.swap((77, 77))
    assert (other.place.stat().st_uid, other.place.stat().st_gid) == (77, 77)
    other.close()


def test_a_mark_is_of_one_file_as_it_was_written(place: Path, made: Replacement) -> None:
    before, mark = replace_file.mark(place), made.mark()
    assert mark == replace_file.mark(replace_file.paths(place, ID)[0]) != before
    made.swap()
    assert replace_file.mark(place) == mark
    os.utime(place, ns=(0, 0))
    assert replace_file.mark(place) != mark


def test_a_file_is_written_over_only_if_that_was_said_and_never_beside_an_only_copy(
    place: Path,
) -> None:
    replace_file.check_destination(place, ID, replace=True)
    with pytest.raises(BadInput, match="already exists; overwrite it with --replace"):
        replace_file.check_destination(place, ID, replace=False)
    replace_file.paths(place, ID)[1].symlink_to("/nowhere")
    with pytest.raises(BadInput, match="was left by an interrupted restore; run vmckpt recover"):
        replace_file.check_destination(place, ID, replace=True)


def test_what_is_not_there_is_removed_already(place: Path) -> None:
    replace_file.remove(place)
    replace_file.remove(place)
    replace_file.remove(place.parent / "gone" / "vda")
    assert contents(place) == {}
