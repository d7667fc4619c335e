"""All hints of the product that contain a command, read from its source.

`python -m tests.support.hint_inventory` prints them. A hint is a string, other than documentation,
that names a command to type. What a template inserts is shown as {}, so a template counts once.
"""

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.support.paths import ROOT
from vmckpt.cli.commands import places

PLACEHOLDER = "{}"
SHELL = (
    "apt-get install", "chmod", "chown", "echo vm", "journalctl", "lsblk", "mkdir", "mount -o",
    "qemu-img", "setsebool", "ssh {}", "sysctl", "systemctl", "timedatectl",
)  # fmt: skip
"""Commands that hints name, besides those of virsh and vmckpt."""
# Words that follow a command in a sentence. Options begin with a dash, so `--to` is not one.
_AFTER = frozenset((
    "after", "again", "and", "as", "at", "before", "but", "first", "for", "from", "if", "in",
    "into", "on", "once", "or", "prints", "read-write", "so", "the", "then", "there", "to", "until",
    "when", "which", "while", "with", "without",
))  # fmt: skip
_FIRST = re.compile(
    r"(?:(?:^|[:;,] |\()(?=virsh |vmckpt )|: (?=[a-z])|"
    r"\b(?:and|or|run|see|start|then|through|until|use|when|with) )"
    r"((?:virsh|vmckpt|" + "|".join(re.escape(one) for one in SHELL) + r") )"
)


@dataclass(frozen=True)
class Command:
    """A command in a hint."""

    words: tuple[str, ...]
    host: str | None = None
    """The host that the hint names after the command: "… on beta"."""

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Hint:
    """A string of the product that contains a command."""

    text: str
    places: tuple[str, ...]
    """Modules that contain it."""


@cache
def _names() -> frozenset[str]:
    """The commands of vmckpt."""
    return frozenset(places())


def commands(text: str) -> tuple[Command, ...]:
    """Return the commands in a text, each up to the next word of the sentence."""
    return tuple(
        one for found in _FIRST.finditer(text) if (one := _command(text[found.start(1) :]))
    )


def _command(text: str) -> Command | None:
    words: list[str] = []
    rest = re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", text)
    host = None
    for at, word in enumerate(rest):
        if word in _AFTER or word.startswith("("):
            if word == "on" and at + 1 < len(rest):
                host = rest[at + 1].strip(",;:.)")
            break
        words.append(word.rstrip(",;:)"))
        if word != words[-1]:
            break
    try:
        words = [part for word in words for part in shlex.split(word)]
    except ValueError:
        return None
    return Command(tuple(words), host) if _is_command(words) else None


def _is_command(words: list[str]) -> bool:
    if len(words) < 2:
        return False
    if words[0] == "vmckpt":
        return words[1] in _names() or words[1].startswith(PLACEHOLDER)
    if words[0] == "virsh":
        return re.fullmatch(r"[a-z-]+", words[1]) is not None
    return words[0] != "ssh" or "." not in words[1]


def _documentation(tree: ast.AST) -> set[int]:
    """Return the docstrings of a module, and what is only the help of a command or an option."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            found.add(id(node.value))
        if isinstance(node, ast.keyword) and node.arg in ("help", "epilog", "short_help"):
            found |= {id(one) for one in ast.walk(node.value)}
        if isinstance(node, ast.Call) and _called(node.func) in ("Option", "Argument", "field"):
            found |= {id(one) for one in ast.walk(node)}
    return found


def _called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _strings(tree: ast.AST) -> Iterator[str]:
    inside = _documentation(tree)
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in ast.walk(node)}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else PLACEHOLDER
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{\w+\}", PLACEHOLDER, node.value)


def inventory() -> dict[str, Hint]:
    """Return all hints with a command, by their text."""
    found: dict[str, list[str]] = {}
    for page in sorted([*ROOT.glob("vmckpt/**/*.py"), *ROOT.glob("tui/**/*.py")]):
        place = str(page.relative_to(ROOT))
        for text in _strings(ast.parse(page.read_text())):
            # A script has several lines, and a command of the program itself is a list of words.
            if "\n" not in text and commands(text):
                found.setdefault(text, []).append(place)
    return {text: Hint(text, tuple(dict.fromkeys(places))) for text, places in found.items()}


def main() -> None:
    """Print the hints with their commands."""
    for one in inventory().values():
        sys.stdout.write(f"{', '.join(one.places)}: {one.text}\n")
        for command in commands(one.text):
            on = f" on {command.host}" if command.host else ""
            sys.stdout.write(f"    {command}{on}\n")


if __name__ == "__main__":
    main()
