"""Commands that messages and help tell people to type exist, and have the options that are told."""

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tests.support.paths import ROOT
from vmckpt.cli import app

_TOLD = re.compile(r"\bvmckpt ([a-z][a-z-]*(?:[ \n]+[^\s;,:()\"'`|…]+)*)")


def texts(page: Path) -> Iterator[str]:
    """All strings of a module; what is put into one is an X."""
    inside: set[int] = set()
    for node in ast.walk(ast.parse(page.read_text())):
        if isinstance(node, ast.JoinedStr):
            inside |= {id(part) for part in node.values}
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.value


def told() -> Iterator[tuple[Path, str]]:
    for page in sorted([*ROOT.glob("vmckpt/**/*.py"), *ROOT.glob("tui/**/*.py")]):
        yield from {(page, one) for text in texts(page) for one in _TOLD.findall(text)}


def wrong(words: list[str]) -> str | None:
    """What the program does not know of it."""
    command: Any = typer.main.get_command(app.app)
    context = command.make_context("vmckpt", [], resilient_parsing=True)
    names = command.list_commands(context)
    if words[0] not in names:  # "vmckpt that made it", but no "vmckpt snapshots"
        meant = difflib.get_close_matches(words[0], names, 1, 0.8)
        return f"no command {words[0]}, but {meant[0]}" if meant else None
    while (
        words and hasattr(command, "list_commands") and words[0] in command.list_commands(context)
    ):
        command = command.get_command(context, words.pop(0))
        context = command.make_context(None, [], parent=context, resilient_parsing=True)
    options = {one for param in command.params for one in (*param.opts, *param.secondary_opts)}
    words = words[: words.index("--")] if "--" in words else words
    asked = {word.rstrip(".") for word in words if word.startswith("--") and "X" not in word}
    return f"no option {asked - options}" if asked - options - {"--help"} else None


def test_what_people_are_told_to_type_exists() -> None:
    found = list(told())
    assert len(found) > 100
    bad = [(page, one, why) for page, one in found if (why := wrong(one.split())) is not None]
    assert bad == []


def test_what_does_not_exist_is_found() -> None:
    assert wrong(["snapshot", "list", "--no-such"]) is not None
    assert wrong(["snapshots", "list"]) is not None
    assert wrong(["snapshot", "list", "X", "--json"]) is None
