"""Folders in which QEMU's user makes what it is asked for."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.following import words
from vmckpt.errors import BadInput
from vmckpt.hypervisor import qemu_user

NOBODY = (65534, 65534)


@pytest.fixture
def state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_a_folder_is_that_users_and_nobody_elses(state: Path) -> None:
    for _ in range(2):
        made = qemu_user.make_folder(state / "agent" / "scratch", NOBODY)
        told = made.stat()
        assert (told.st_uid, told.st_gid, told.st_mode & 0o777) == (*NOBODY, 0o700)


def test_a_folder_above_it_that_is_closed_is_named(state: Path) -> None:
    state.chmod(0o700)
    with pytest.raises(BadInput, match="has no access to this directory") as caught:
        qemu_user.make_folder(state / "agent" / "scratch", NOBODY)
    assert caught.value.hint == f"run chmod o+x {state} on that host"
    qemu_user.make_folder(state / "agent" / "scratch", (0, 0))


def test_qemu_has_access_once_the_directories_that_the_hints_name_are_open(state: Path) -> None:
    above = state / "of agents"
    above.mkdir(mode=0o700)
    state.chmod(0o700)
    for closed in (state, above):
        with pytest.raises(BadInput) as caught:
            qemu_user.make_folder(above / "scratch", NOBODY)
        assert str(closed) in str(caught.value)
        subprocess.run(words(str(caught.value)), check=True)
    qemu_user.make_folder(above / "scratch", NOBODY)


def test_where_it_cannot_be_tried_nothing_is_refused(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.chmod(0o700)
    monkeypatch.setenv("PATH", str(state))
    qemu_user.make_folder(state / "agent", NOBODY)
