"""What TAB brings in a shell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal

HOSTS = """
hosts:
  alpha: {uri: "qemu+tcp://127.0.0.1:1/system"}
  beta: {uri: "qemu+tcp://127.0.0.1:1/system"}
"""


def completed(folder: Path, line: str) -> list[str]:
    """What bash is told for a command line with the cursor at its end."""
    words = line.split(" ")
    environment = {
        **os.environ, "_VMCKPT_COMPLETE": "complete_bash", "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1), "VMCKPT_STATE": str(folder),
        "VMCKPT_INVENTORY": str(folder / "hosts.yaml"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "vmckpt.cli.app"], env=environment, text=True, timeout=60,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts.yaml").write_text(HOSTS)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vmckpt migrate web1 --to ", ["alpha", "beta"]),
        ("vmckpt migrate web1 --to b", ["beta"]),
        ("vmckpt evacuate ", ["alpha", "beta"]),
        ("vmckpt roll alpha b", ["beta"]),
        ("vmckpt migrate w", []),  # no host answers
    ],
)
def test_names_of_hosts_are_completed(folder: Path, line: str, expected: list[str]) -> None:
    assert completed(folder, line) == expected


def test_jobs_are_completed_by_their_ids_and_guests(folder: Path) -> None:
    with Journal(folder / "journal.db") as journal:
        id_ = journal.begin(NewOperation(kind="migrate", guest="web1"), asked_by="eve@desk")

    assert completed(folder, "vmckpt watch ") == sorted([id_, "web1"])


def test_a_broken_inventory_is_not_told_of_in_the_middle_of_a_line(folder: Path) -> None:
    (folder / "hosts.yaml").write_text("hosts: [")

    assert completed(folder, "vmckpt migrate web1 --to ") == []


def test_a_name_that_a_shell_would_run_is_not_completed(folder: Path) -> None:
    with Journal(folder / "journal.db") as journal:
        for name in ("web9", "web9;touch PWNED", "web9 x", "-web9", "web9$(id)"):
            journal.begin(NewOperation(kind="migrate", guest=name, guest_uuid=name))
    assert completed(folder, "vmckpt job web9") == ["web9"]
