"""docs/start.md, line by line, as a new user types it."""

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import VMCKPT, Done, finish, first_line, traces
from tests.support import doc_commands
from tests.support.doc_examples import differences
from tests.support.paths import ROOT
from vmckpt_lab.plan import LABS

PAGE = ROOT / "docs/start.md"
_BROKEN = "migrate web1 --to alpha --mode precopy"
"""The one whose target is switched off."""


def commands() -> list[str]:
    """What is typed from the second step on, until one's own hosts."""
    before, _, after = PAGE.read_text().partition("## 2.")
    first = before.count("\n")
    last = first + after[: after.index("## And now")].count("\n")
    return [
        line.removeprefix("vmckpt ")
        for number, line in doc_commands.commands(PAGE)
        if first < number <= last
    ]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    name = f"s{os.getpid()}"
    told = {
        "VMCKPT_LAB": name, "VMCKPT_INVENTORY": str(LABS / name / "hosts.yaml"),
        "VMCKPT_STATE": str(tmp_path),
    }  # fmt: skip
    made = {**os.environ, **told}
    yield made
    subprocess.run([*VMCKPT, "lab", "down"], env=made, check=False, capture_output=True)
    assert traces(f"{name}/") + traces(f"{name}.") == []


def start(line: str, environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*VMCKPT, *shlex.split(line)], env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.long
def test_every_line_does_what_the_page_says(environment: dict[str, str]) -> None:
    lines = commands()
    assert len(lines) > 20
    dying: subprocess.Popen[str] | None = None
    ended: dict[str, Done] = {}
    for line in lines:
        if line == "dashboard":  # tests/lab/test_dashboard.py types into it
            continue
        if line == _BROKEN:
            dying = start(line, environment)
            first_line(dying, "iteration=1")
            continue
        done = ended[line] = finish(start(line, environment))
        assert done.code == 0, f"{line}: {done.err}"
        if dying is not None and line.startswith("lab kill"):
            assert (failed := finish(dying)).code == 20
            assert "web1 is running on beta" in failed.err
            dying = None
    assert dying is None
    printed = {f"vmckpt {line}": done.out for line, done in ended.items()}
    assert (found := differences(PAGE, printed)) == [], "\n".join(found)
    assert "web1 is running on alpha" in ended["failover web1 --host-is-off"].out
    assert "web1" in ended["evacuate beta --yes"].out + ended["evacuate beta --yes"].err
