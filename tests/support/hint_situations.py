"""Which test runs each hint in its situation: the lists in tests/fixtures/hints.yaml.

`run` has the hints that each test takes from a message and runs. `exceptions` has those that no
test can run here, with the reason. `open` has those that no test runs yet; the list may only become
shorter. `not_hints` has texts that mention a command without asking for it. After a change of
texts, `python -m tests.support.hint_situations` writes `open` again.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.support.hint_inventory import inventory
from tests.support.paths import FIXTURES, ROOT

FILE = FIXTURES / "hints.yaml"


@dataclass(frozen=True)
class Situations:
    """All lists of the file."""

    run: Mapping[str, Sequence[str]]
    """The hints that a test takes, by the test."""
    exceptions: Mapping[str, Sequence[str]]
    """Hints that no test can run here, by the reason."""
    open: Sequence[str]
    not_hints: Sequence[str]

    def all(self) -> Iterator[str]:
        for texts in (*self.run.values(), *self.exceptions.values(), self.open, self.not_hints):
            yield from texts


@cache
def situations() -> Situations:
    """Read the file."""
    read: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return Situations(**read)


def exists(node: str) -> bool:
    """Return whether a test of this name is in its file."""
    path, _, name = node.partition("::")
    page = ROOT / path
    if not page.is_file():
        return False
    named = {one.name for one in ast.walk(ast.parse(page.read_text()))
             if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
    return name.partition("[")[0] in named


def promised(node: str) -> frozenset[str]:
    """Return the hints that a test must take; a name without parameters stands for all cases."""
    known = situations().run
    whole = known.get(node.partition("[")[0], ())
    return frozenset((*known.get(node, ()), *whole))


def main() -> None:
    """Write the list of open hints again."""
    read = yaml.safe_load(FILE.read_text())
    found = inventory()
    listed = {text for key in ("run", "exceptions") for texts in read[key].values()
              for text in texts} | set(read["not_hints"])  # fmt: skip
    read["open"] = [text for text in found if text not in listed]
    FILE.write_text(yaml.safe_dump(read, sort_keys=False, allow_unicode=True, width=1000))


if __name__ == "__main__":
    main()
