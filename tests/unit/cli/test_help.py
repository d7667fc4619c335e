"""The help of every command, in a terminal of 80 columns and 24 lines."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from vmckpt.cli import app

COLUMNS, LINES = 80, 24


def helps(path: str, command: Any, parent: Any = None) -> Iterator[tuple[str, str, list[str]]]:
    """Each command with its description and the lines of its help."""
    context = command.context_class(
        command, info_name=path.rpartition(" ")[2], parent=parent, terminal_width=COLUMNS,
        max_content_width=COLUMNS,
    )  # fmt: skip
    yield path, command.help or "", command.get_help(context).splitlines()
    for name in command.list_commands(context) if hasattr(command, "list_commands") else []:
        yield from helps(f"{path} {name}", command.get_command(context, name), context)


FOUND = {
    path: (told, lines) for path, told, lines in helps("vmckpt", typer.main.get_command(app.app))
}


@pytest.mark.parametrize("path", FOUND)
def test_no_line_of_help_is_too_wide_or_cut_off(path: str) -> None:
    _, lines = FOUND[path]
    assert [line for line in lines if len(line) > COLUMNS] == []
    body = lines[lines.index("") :]  # below the usage, where "..." means "or more"
    assert [line for line in body if re.search(r"\w\.\.\.$", line)] == []
    # Without a metavar, a variable or a type of Python is shown.
    assert [line for line in lines if re.search(r"\{[a-z_]+\}|--\w+ <(str|path)>", line)] == []


@pytest.mark.parametrize("path", FOUND)
def test_examples_are_not_wrapped(path: str) -> None:
    told, lines = FOUND[path]
    examples = {line.strip() for line in told.splitlines() if line.startswith("    vmckpt ")}
    assert examples - {line.strip() for line in lines} == set()


@pytest.mark.parametrize("path", FOUND)
def test_the_first_screen_says_what_the_command_does(path: str) -> None:
    told, lines = FOUND[path]
    first = " ".join(" ".join(lines[:LINES]).split())
    assert lines[0].startswith("Usage: vmckpt")
    assert " ".join(told.split("\n\n")[0].split()) in first
