"""The command lines in the pages of docs, and which tests run them."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

TYPED = (
    "start.md", "snapshots.md", "migration.md", "policies.md", "evacuation.md", "monitoring.md",
    "dashboard.md", "lab.md",
)  # fmt: skip
"""Pages whose commands tests/lab/test_start.py and test_pages.py type, in the order of the page."""
NOT_TYPED = {
    "vmckpt snapshot open NAME --disk vda:1 --get /etc/fstab --to -":
        "a disk with partitions and ext4: tests/unit/cli/snapshot/test_browse.py",
    'vmckpt roll alpha beta --run "apt-get -y dist-upgrade && systemctl reboot"':
        "a host that reboots: tests/lab/test_evacuate.py",
    "vmckpt dashboard --serve": "in a browser: tests/tui/test_web.py",
    "vmckpt lab down": "other tests use the lab: tests/lab/test_start.py",
    "vmckpt notify": "needs receivers: tests/unit/cli/test_notify.py",
    "vmckpt events --follow --json": "prints nothing yet: tests/lab/test_monitoring.py",
}  # fmt: skip
"""Commands of these pages that are not typed, each with the reason and the test that runs it."""
_RUN = ("tests/lab", "tests/unit/cli", "tests/unit/snapshot", "tests/tui", "tests/support")
_LISTS_ONLY = ROOT / "tests/tui/action_lists"
_BY = {
    "taken": "snapshot create web1", "stock": "snapshot", "migrate": "migrate web1 --to",
    "serving": "snapshot open", "standby": "protect --to --interval --failover --ttl",
    "listening": "vmckpt dashboard --serve", "forked": "fork",
}  # fmt: skip
"""What functions of tests put before their arguments."""
_GROUPS = {"snapshot": 2, "policy": 2, "maintenance": 2, "lab": 2, "audit": 2}


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    number: int
    """Of its first line."""
    tag: str
    """The language of a fenced block; empty if the block is indented."""
    lines: tuple[str, ...]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of code of a page. A block in a list is part of the list."""
    lines = [*page.read_text().split("\n"), ""]
    number = 0
    while number < len(lines):
        first = number
        if lines[number].startswith("```"):
            number = lines.index("```", number + 1)
            yield Block(first + 2, lines[first][3:], tuple(lines[first + 1 : number]))
        elif not lines[number - 1] and re.match(r"    [^ *]", lines[number]):
            while lines[number].startswith("    "):
                number += 1
            yield Block(first + 1, "", tuple(one[4:] for one in lines[first:number]))
        number += 1


def code_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines that are typed, with the number of each; a continued line is put together."""
    for block in blocks(page):
        held, began = "", 0
        for number, line in enumerate(block.lines, start=block.number):
            if block.tag == "console" and not line.startswith("$ "):
                continue  # what the command prints
            began = began if held else number
            held += line.strip()
            if held.endswith("\\"):
                held = held[:-1]
                continue
            yield began, held
            held = ""


def commands(page: Path) -> Iterator[tuple[int, str]]:
    """The vmckpt commands of a page, each with its line. No synopses."""
    for number, line in code_lines(page):
        for one in line.partition("#")[0].split(";"):
            words = one.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            # A synopsis has brackets; a pipe ends what is ours.
            if words.startswith("vmckpt ") and not re.search(r"\[|\s\|\s\w+ \w", words):
                yield number, words


def essence(line: str) -> frozenset[str]:
    """The names of a command and of its options, without values."""
    words = shlex.split(line)[1:]
    words = words[: words.index("--")] if "--" in words else words
    options = [one for one in words if one.startswith("--")]
    while words[0].startswith("-"):  # options of vmckpt itself; --journal has a value
        words = words[2 if words[0] == "--journal" else 1 :]
    names = words[: 3 if words[:2] == ["snapshot", "keys"] else _GROUPS.get(words[0], 1)]
    return frozenset((*names, *options))


def executed() -> list[frozenset[str]]:
    """The words of every call and list in tests that can be a command."""
    return [words for folder in _RUN for path in sorted((ROOT / folder).rglob("*.py"))
            if _LISTS_ONLY not in path.parents for words in _words_in(path)]  # fmt: skip


def _words_in(path: Path) -> Iterator[frozenset[str]]:
    for one in ast.walk(ast.parse(path.read_text())):
        if not isinstance(one, ast.Call | ast.List | ast.Tuple):
            continue
        first = ""
        if isinstance(one, ast.Call):
            name = one.func.attr if isinstance(one.func, ast.Attribute) else ""
            first = _BY.get(one.func.id if isinstance(one.func, ast.Name) else name, "")
        parts = one.args if isinstance(one, ast.Call) else one.elts
        texts = [
            each.value for part in parts for each in ast.walk(part)
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]  # fmt: skip
        if texts or first:
            yield frozenset(word for text in (first, *texts) for word in text.split())
