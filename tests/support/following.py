"""Take the commands of a hint from the message that contains it, as an operator does.

A test calls `take` with what the product printed. Which hints each test must take is the table in
`hint_situations`; tests/conftest.py compares it with what the test took.
"""

import re
from functools import cache

from tests.support.hint_inventory import PLACEHOLDER, Command, commands, inventory
from tests.support.hint_situations import situations

taken: set[str] = set()
"""Texts of the hints that the current test has taken so far."""
_WORD = re.compile(r"\b[A-Z]{3,}\b")


@cache
def _forms() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return a pattern for each hint, the one with the longest text first."""
    hints = inventory().keys() - set(situations().not_hints)
    ordered = sorted(hints, key=lambda text: -len(text.replace(PLACEHOLDER, "")))
    return tuple(
        (re.compile(r"(?<!\w)" + ".+?".join(map(re.escape, text.split(PLACEHOLDER)))), text)
        for text in ordered
    )


def hint_in(message: str) -> tuple[str, str]:
    """Return the template of the hint in a message, and the message from the hint on."""
    line = " ".join(message.split())
    for form, text in _forms():
        if (match := form.search(line)) is not None:
            return text, line[match.start() :]
    raise AssertionError(f"no hint of the product is in {message!r}")


def take(message: str, **values: str) -> tuple[Command, ...]:
    """Return the commands of the hint in a message, and note that the test has taken the hint.

    `values`: what the operator puts in place of the capital words of the hint, such as FILE.
    """
    text, told = hint_in(message)
    taken.add(text)
    found = commands(told)[: len(commands(text))]
    capital = {word for one in commands(text) for word in _WORD.findall(str(one))}
    assert capital == set(values), f"{text!r} has {sorted(capital)}, not {sorted(values)}"
    return tuple(
        Command(tuple(_WORD.sub(lambda word: values.get(word[0], word[0]), part)
                      for part in one.words), one.host)
        for one in found
    )  # fmt: skip


def words(message: str, **values: str) -> list[str]:
    """Take the hint in a message, which must have a single command; the words of the command."""
    (only,) = take(message, **values)
    return list(only.words)
