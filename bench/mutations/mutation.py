"""A mutation: a safety-critical line, and how it is broken. Pure, except `problems`."""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

LEAST = 40
"""Minimum number of mutations in a table."""


class Area(StrEnum):
    """What a line protects."""

    LEASE = "lease"
    LEASE_TIMER = "lease timer"
    TAKEOVER = "takeover"
    OUTPUT_ORDER = "output order"
    EPOCHS = "epochs"
    CONNECTION = "connection"
    PAGE_COMPARISON = "page comparison"
    WRITE_TRACKING = "write tracking"
    FENCING = "fencing"
    PREFLIGHT = "preflight"
    PROCESS_IDENTITY = "process identity"
    HOST_DIRECTORIES = "host directories"
    SIGNATURE = "signature"
    GARBAGE_COLLECTION = "garbage collection"
    DURABILITY = "durability"
    HARMLESS_XML = "harmless XML"
    AUDIT = "audit trail"
    ROLES = "roles"


class OutOfDate(Exception):
    """The table does not match the tree: a line was changed, but its mutation was not."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests that must detect a mutation."""

    files: tuple[str, ...]
    keyword: str = ""
    """Expression for pytest's -k; empty: all tests of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A line that is broken on purpose."""

    name: str
    area: Area
    file: str
    """Path relative to the root of the tree."""
    old: str
    """The original text, which occurs exactly once in the file."""
    new: str
    suite: Suite
    breaks: str
    """What would happen if this were the code, as one sentence."""

    def applied(self, text: str) -> str:
        """Return the file's text with the mutation applied. Raises OutOfDate."""
        count = text.count(self.old)
        if count != 1:
            raise OutOfDate(f"{self.name}: its text occurs {count} times in {self.file}")
        return text.replace(self.old, self.new)


def _file(name: str) -> str:
    folder, _, module = name.rpartition("/")
    return f"{folder}/test_{module}.py".removeprefix("/")


def unit(*names: str, keyword: str = "") -> Suite:
    """Return the suite of the unit tests of modules, named like "lease/terms"."""
    return Suite(tuple(f"tests/unit/{_file(name)}" for name in names), keyword)


def chosen(table: Sequence[Mutation], words: Sequence[str]) -> tuple[Mutation, ...]:
    """Return the mutations whose name or area is in `words`; all mutations if `words` is empty.

    Raises ValueError for a word that is neither a name nor an area.
    """
    known = {one.name for one in table} | {str(one.area) for one in table}
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"no mutation and no area is called {unknown[0]!r}")
    return tuple(one for one in table if not words or {one.name, str(one.area)} & {*words})


def problems(table: Sequence[Mutation], root: Path) -> Iterator[str]:
    """Yield the problems of a table, each with the name of the mutation."""
    if len(table) < LEAST:
        yield f"there are {len(table)} mutations, and {LEAST} are required"
    for name, count in Counter(one.name for one in table).items():
        if count > 1:
            yield f"{name}: {count} mutations have this name"
    there = {one.area for one in table}
    yield from (f"no mutation is about {area}" for area in Area if area not in there)
    for one in table:
        yield from _problems_of(one, root)


def _problems_of(one: Mutation, root: Path) -> Iterator[str]:
    for test in one.suite.files:
        if not (root / test).is_file():
            yield f"{one.name}: there is no {test}"
    if not one.breaks.endswith(".") or len(one.breaks) < 20:
        yield f"{one.name}: it does not say in a sentence what it breaks"
    path = root / one.file
    if not path.is_file():
        yield f"{one.name}: there is no {one.file}"
        return
    text = path.read_text()
    try:
        mutated = _code(one.applied(text))
    except (OutOfDate, SyntaxError) as exc:
        yield str(exc) if isinstance(exc, OutOfDate) else f"{one.name}: is no Python: {exc}"
        return
    if mutated == _code(text):
        yield f"{one.name}: it changes no code"


@lru_cache(maxsize=64)
def _code(text: str) -> str:
    """Return code in a form without layout and comments. Raises SyntaxError."""
    return ast.dump(ast.parse(text))
