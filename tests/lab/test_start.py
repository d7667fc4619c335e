"""docs/start.md, line by line, as a new user types it."""

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import VMCKPT, Done, finish, first_line, traces
from tests.support.paths import ROOT
from vmckpt_lab.plan import LABS

PAGE = ROOT / "docs/start.md"
_BROKEN = "migrate web1 --to alpha --mode precopy"
"""The one whose target is switched off."""


def commands() -> list[str]:
    """What is typed from the second step on, until one's own hosts."""
    text = PAGE.read_text()
    text = text[text.index("## 2.") : text.index("## And now")]
    lines = [line.strip().partition("#")[0].strip() for line in text.split("\n")]
    return [line.removeprefix("vmckpt ") for line in lines if line.startswith("vmckpt ")]


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
        if line.startswith("lab kill"):
            assert dying is not None
            assert finish(dying).code != 0
    assert "intact" in ended["lab verify web1"].out
    assert "web1" in ended["evacuate beta --yes"].out + ended["evacuate beta --yes"].err
