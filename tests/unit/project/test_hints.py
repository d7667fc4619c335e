"""Commands that messages and help tell people to type exist, and have the options that are told."""

import ast
import difflib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tests.support.hint_inventory import PLACEHOLDER, commands, inventory
from tests.support.hint_situations import exists, situations
from tests.support.paths import ROOT
from vmckpt.cli import app

OPEN = 95
"""Number of hints that no test runs yet. It only becomes smaller."""
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
        meant = difflib.get_close_matches(words[0], names, 1, 0.87)
        return f"no command {words[0]}, but {meant[0]}" if meant else None
    if words[0] == "fork" and words[1:2] not in (["create"], ["tree"], ["drop"], ["keep"]):
        words = ["fork", "create", *words[1:]]  # create may be omitted
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


def test_each_hint_with_a_command_is_in_the_list_of_situations() -> None:
    found, known = inventory(), situations()
    assert len(found) > 200
    listed = Counter(known.all())
    assert [text for text in found if text not in listed] == [], "see hint_situations"
    assert [text for text in listed if text not in found] == [], "see hint_situations"
    aside = [
        *known.open,
        *known.not_hints,
        *(t for texts in known.exceptions.values() for t in texts),
    ]
    run = {text for texts in known.run.values() for text in texts}
    assert [text for text, times in Counter(aside).items() if times > 1 or text in run] == []


def test_each_test_in_the_list_of_situations_exists() -> None:
    assert [node for node in situations().run if not exists(node)] == []
    assert not exists("tests/unit/project/test_hints.py::test_that_is_not_there")


def test_the_list_of_hints_that_no_test_runs_only_becomes_shorter() -> None:
    assert len(situations().open) <= OPEN


def test_the_commands_in_hints_have_all_arguments() -> None:
    """A name that the product does not know is a capital word, such as GUEST."""
    aside = set(situations().not_hints)
    bad = [
        (text, why)
        for text in inventory()
        if text not in aside
        for one in commands(text)
        if (why := lacking(list(one.words))) is not None
    ]
    assert bad == []


def lacking(words: list[str]) -> str | None:
    """The first required argument of a vmckpt command that is not there."""
    if words[0] != "vmckpt" or PLACEHOLDER in words[1]:
        return None
    command: Any = typer.main.get_command(app.app)
    context, left = command.make_context("vmckpt", [], resilient_parsing=True), words[1:]
    while left and hasattr(command, "list_commands") and left[0] in command.list_commands(context):
        command = command.get_command(context, left.pop(0))
        context = command.make_context(None, [], parent=context, resilient_parsing=True)
    if not left and hasattr(command, "list_commands") and command.list_commands(context):
        return "the subcommand"
    flags = {one for param in command.params if getattr(param, "is_flag", False)
             for one in param.opts}  # fmt: skip
    given, asks = [], iter(left)
    for word in asks:
        if not word.startswith("-"):
            given.append(word)
        elif word not in flags:
            next(asks, None)
    needed = [param for param in command.params if param.required]
    arguments = [param.name for param in needed if param.param_type_name == "argument"]
    options = [param.opts[0] for param in needed if not set(param.opts) & {*left, param.name}
               and param.param_type_name == "option"]  # fmt: skip
    return next(iter((*arguments[len(given) :], *options)), None)


def test_an_argument_that_is_missing_is_found() -> None:
    assert lacking(["vmckpt", "unprotect"]) == "guest"
    assert lacking(["vmckpt", "migrate", "GUEST"]) == "--to"
    assert lacking(["vmckpt", "migrate", "GUEST", "--to", "{}"]) is None
    assert lacking(["vmckpt", "snapshot"]) == "the subcommand"
    assert lacking(["virsh", "start"]) is None, "tests/lab/test_hints.py asks virsh"


# A word that ends or removes a guest, and what such a hint says with it.
_ENDS = re.compile(r"virsh (?:-c \S+ )?(?:destroy|undefine|managedsave-remove)")
_PROVES = (
    "find out which", "keep one copy", "if that guest is not needed", "restart it with its own",
    "to discard the saved memory", "then start the guest from its disks",
)  # fmt: skip
_COPY = "virsh -c {} destroy {}"
"""Ends a test copy of a standby, which has a name of its own."""


def test_a_hint_that_ends_a_guest_says_what_to_find_out_first() -> None:
    ends = [text for text in inventory() if _ENDS.search(text) and text != _COPY]
    assert len(ends) > 5
    assert [text for text in ends if not any(one in text for one in _PROVES)] == []
