"""On whose behalf a process acts: its user, or the user that became root."""

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.util.acting_user import acting_user

ANN, BOB = 51001, 51002
USERS = {"root": 0, "ann": ANN, "bob": BOB}
UNSET = "4294967295"


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Users of our own: ann is in the group operators; this process is root."""

    def by_name(name: str) -> pwd.struct_passwd:
        return pwd.struct_passwd((name, "x", USERS[name], USERS[name], "", "/", "/bin/sh"))

    def by_id(uid: int) -> pwd.struct_passwd:
        return by_name({number: name for name, number in USERS.items()}[uid])

    def groups(name: str, gid: int) -> list[int]:
        return [gid, 7] if name == "ann" else [gid]

    monkeypatch.setattr(pwd, "getpwnam", by_name)
    monkeypatch.setattr(pwd, "getpwuid", by_id)
    monkeypatch.setattr(os, "getgrouplist", groups)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((
        {7: "operators"}[gid], "x", gid, []
    )))  # fmt: skip
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "getppid", lambda: 30)
    monkeypatch.delenv("SUDO_USER", raising=False)
    acting_user.cache_clear()
    yield
    acting_user.cache_clear()


def proc(folder: Path, *, login: str | None = UNSET, parents: tuple[int, ...] = (0, 0)) -> Path:
    """A /proc of a process with these real users of its parents, the nearest first."""
    (folder / "self").mkdir()
    if login is not None:
        (folder / "self/loginuid").write_text(login)
    pids = [30 - number for number in range(len(parents))]
    for pid, uid, parent in zip(pids, parents, [*pids[1:], 0], strict=False):
        (folder / str(pid)).mkdir()
        status = f"Name:\tx y\nPPid:\t{parent}\nUid:\t{uid}\t0\t0\t0\n"
        (folder / str(pid) / "status").write_text(status)
    return folder


def test_a_user_that_is_not_root_acts_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: ANN)
    monkeypatch.setenv("SUDO_USER", "bob")
    found = acting_user(proc(tmp_path, login=str(BOB), parents=(BOB,)))
    assert (found.name, found.groups, found.root) == ("ann", frozenset({"operators"}), False)


def test_root_that_nobody_became_acts_itself(tmp_path: Path) -> None:
    found = acting_user(proc(tmp_path))
    assert (found.name, found.root) == ("root", True)


def test_root_that_logged_in_acts_itself(tmp_path: Path) -> None:
    assert acting_user(proc(tmp_path, login="0")).root


@pytest.mark.parametrize(
    ("login", "parents", "sudo_user", "name"),
    [
        (str(ANN), (0, 0), None, "ann"),
        (str(ANN), (0, BOB, 0), "bob", "ann"),  # the login user precedes all other evidence
        (UNSET, (0, BOB, 0), None, "bob"),  # sudo, bob's shell, sshd
        (UNSET, (0, BOB, ANN, 0), "ann", "bob"),  # a forged environment
        ("0", (0, BOB, 0), None, "bob"),
        (None, (0, BOB, 0), None, "bob"),  # a kernel without auditing
        (UNSET, (0, 0), "bob", "bob"),  # the parents have ended
        (UNSET, (), "bob", "bob"),
    ],
)
def test_the_user_that_became_root_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, login: str | None, parents: tuple[int, ...],
    sudo_user: str | None, name: str,
) -> None:  # fmt: skip
    if sudo_user is not None:
        monkeypatch.setenv("SUDO_USER", sudo_user)
    found = acting_user(proc(tmp_path, login=login, parents=parents))
    assert (found.name, found.root) == (name, False)


def test_a_user_without_an_account_has_a_number_or_a_name_but_no_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUDO_USER", "gone")
    found = acting_user(proc(tmp_path))
    assert (found.name, found.groups, found.root) == ("gone", frozenset(), False)
    acting_user.cache_clear()
    (tmp_path / "self/loginuid").write_text("51999")
    found = acting_user(tmp_path)
    assert (found.name, found.groups, found.root) == ("51999", frozenset(), False)


def test_a_loop_of_parents_ends(tmp_path: Path) -> None:
    folder = proc(tmp_path, parents=(0,))
    (folder / "30/status").write_text("PPid:\t30\nUid:\t0\t0\t0\t0\n")
    assert acting_user(folder).root


PARENT = """
import os, subprocess, sys
os.setresuid(int(sys.argv[1]), 0, 0)
child = "import os; os.setresuid(0, 0, 0);" + sys.argv[2]
subprocess.run([sys.executable, "-c", child], check=True)
"""
CHILD = "from vmckpt.util.acting_user import _PROC, _parent; print(_parent(_PROC))"


def test_the_kernel_names_the_user_of_a_parent_process() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PARENT, "65534", CHILD], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["65534"]
