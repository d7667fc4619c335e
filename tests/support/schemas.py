"""What commands print with --json is held against the schemas that `vmckpt schema` shows.

With VMCKPT_SAMPLES=FOLDER it is kept there instead: scripts/schemas makes the schemas of that.
"""

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import typer
from typer._click.globals import get_current_context

from vmckpt.cli import app, docs

SAMPLES = "VMCKPT_SAMPLES"


def held(name: str, value: Any) -> None:
    """Raises AssertionError if that command's schema does not allow it."""
    if name in ("", "schema"):
        return
    text = json.dumps(value)
    if folder := os.environ.get(SAMPLES):
        with Path(folder, name.replace(" ", "_")).open("a") as file:
            file.write(text + "\n")
        return
    errors = _validator(name).iter_errors(json.loads(text))  # as whoever reads it has it
    wrong = jsonschema.exceptions.best_match(errors)
    assert wrong is None, f"vmckpt {name} --json, {wrong.json_path}: {wrong.message}"


def held_text(words: Sequence[str], text: str) -> None:
    """The same of what a command has printed, that was called in these words."""
    name = called(tuple(words))
    if "--json" not in words or name is None:
        return
    try:
        values = [json.loads(text)] if text else []
    except ValueError:
        values = [json.loads(line) for line in text.splitlines()]
    for value in values:
        held(name, value)


def running() -> str:
    """The command that runs in this process now, or nothing."""
    context = get_current_context(silent=True)
    return "" if context is None else str(context.command_path).partition(" ")[2]


def called(words: tuple[str, ...]) -> str | None:
    """The command's name; None: it prints no JSON."""
    known = commands()
    typed = [word for word in words if not word.startswith("-")]
    for start in range(len(typed)):
        for length in (3, 2, 1):
            if (name := " ".join(typed[start : start + length])) in known:
                return name
    return None


@cache
def commands() -> frozenset[str]:
    """Commands that have --json."""
    return frozenset(_below("", typer.main.get_command(app.app), None))


def _below(name: str, command: Any, parent: Any) -> list[str]:
    context = command.context_class(command, info_name=name or "vmckpt", parent=parent)
    if hasattr(command, "list_commands"):
        return [
            found
            for each in command.list_commands(context)
            for found in _below(
                f"{name} {each}".strip(), command.get_command(context, each), context
            )
        ]
    options = {word for one in command.params for word in one.opts}
    return [name] if "--json" in options else []


@cache
def _validator(name: str) -> Any:
    return jsonschema.Draft202012Validator(docs.of(name))
