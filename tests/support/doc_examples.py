"""Example output in the pages of docs, compared in form with what the commands print now.

An example is a fenced block with the tag "console": commands after "$ ", each with its output. Two
outputs have the same form if they have the same lines once values are replaced. A table may have
more or fewer rows. In a page, "…" stands for any number of lines, or for the rest of a line.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.doc_commands import blocks
from tests.support.paths import ROOT

TAGS = {"console", "yaml", "json", "sql", "text", "python"}
"""Of fenced blocks. What no command prints is yaml, json, sql, python or text; an indented block
has commands only."""
ANY = "…"
ELSEWHERE = {
    ("replication.md", "vmckpt status"): "tests/lab/test_replication.py",
    ("failures.md", "vmckpt recover --dry-run"): "tests/lab/test_migrate.py",
}
"""Examples in pages that are not typed, and the tests that compare them with `shown`."""
_UNIT = (
    r"(?:[KMGT]iB(?:/s)?|B(?:/s)?|[kmg]bit(?:/s)?|%|(?:ms|µs|s|min|h|d)\b(?: \d+ (?:s|min|h)\b)?)"
)
_VALUES = (
    (re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d)?)?|\b\d\d:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"(?<![\w.-])\d+(?:\.\d+){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"(?<!\S)/[^\s:,;]+"), "PATH"),
    (re.compile(r"(?<![\w-])[begmps]-[a-z0-9]{4,16}\b"), "ID"),
    (re.compile(rf"(?<![\w.-])[+±]?\d+(?:[.,]\d+)*(?: ?{_UNIT})?|(?<!\S)–(?!\S)"), "N"),
    (re.compile(r"\bN(?: to N)+"), "N"),
    (re.compile(r"\b(N \w+?)s\b"), r"\1"),
    (re.compile(r"\s+"), " "),
)
"""Values that differ between runs and machines, each with its placeholder."""


@dataclass(frozen=True)
class Example:
    """A command in a page, and the output that the page shows."""

    page: str
    number: int
    command: str
    output: tuple[str, ...]


def examples(page: Path) -> Iterator[Example]:
    """The examples of a page, in its order."""
    for block in blocks(page):
        if block.tag != "console":
            continue
        starts = [n for n, line in enumerate(block.lines) if line.startswith("$ ")]
        for start, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
            shown = tuple(line for line in block.lines[start + 1 : end] if line.strip())
            yield Example(page.name, block.number + start, block.lines[start][2:], shown)


def form(line: str) -> str:
    """A line with placeholders for its values."""
    for pattern, placeholder in _VALUES:
        line = pattern.sub(placeholder, line)
    return line.strip()


def _forms(lines: tuple[str, ...]) -> list[str]:
    found = [form(line) for line in lines]
    return [one for n, one in enumerate(found) if n == 0 or one != found[n - 1]]


def difference(example: Example, printed: str) -> str:
    """What the page shows otherwise than the command prints it; empty if the form is the same."""
    shown, now = _forms(example.output), _forms(tuple(filter(str.strip, printed.split("\n"))))
    wanted = "".join(
        r"(?:.*\n)*" if line == ANY
        else re.escape(line.removesuffix(ANY).rstrip()) + (r".*\n" if line.endswith(ANY) else r"\n")
        for line in shown
    )  # fmt: skip
    if re.fullmatch(wanted, "".join(f"{line}\n" for line in now)):
        return ""
    where = f"{example.page}:{example.number}: {example.command}"
    return "\n".join((where, *difflib.unified_diff(shown, now, "shown", "printed", lineterm="")))


def differences(page: Path, printed: Mapping[str, str]) -> list[str]:
    """The examples of a page whose commands were run and print something of another form."""
    found = [(one, printed[one.command]) for one in examples(page) if one.command in printed]
    return [how for one, now in found if (how := difference(one, now))]


def shown(page: str, command: str, printed: str) -> None:
    """Assert that the example of a command in a page has the form of what was printed."""
    (one,) = [one for one in examples(ROOT / "docs" / page) if one.command == command]
    assert (how := difference(one, printed)) == "", how
