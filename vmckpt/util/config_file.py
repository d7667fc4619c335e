"""YAML files that people write, read strictly: what is wrong is named with line, key, likely word.

The form of a file is a pydantic model that forbids unknown keys. A union's tag in it is written in
round brackets ("(word)"), so that it is not taken for a key in messages.
"""

import difflib
import os
import re
import select
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeGuard, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from vmckpt.errors import BadInput

M = TypeVar("M", bound=BaseModel)
Key = str | int

_MOST_BYTES = 1 << 20
# A pipe whose other end never writes would else be waited for without an end.
_PIPE_LIMIT = 5.0
# More of them are counted and not looked at one by one: for each the whole file may be searched.
_MOST_PROBLEMS = 100
_LONGEST_NUMBER = 40
_LONGEST_LINE = 500
_MOST_WORDS = 30
# Some thousand hosts; to read so many takes seconds.
_MOST_NODES = 100_000
_DEEPEST = 50
"""Levels; no file of ours has ten."""
# What no terminal, journal or libvirt takes well, and what is no character at all.
_UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

_WORDS = {
    "model_type": "must be keys with values",
    "dict_type": "must be keys with values",
    "list_type": "must be a list, like [a, b]",
    "string_type": "must be text; put it in quotes",
    "too_short": "must not be empty",
}
"""Plainer words for some of pydantic's error types."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a file."""

    line: int
    """From 1; 0 if it is not known."""
    text: str

    def at(self, path: Path) -> str:
        """As one line for people: "hosts.yaml:7: hosts.beta.uri is missing"."""
        text = shortened(" ".join(self.text.split()))  # a key may hold a line break
        return f"{path}:{self.line}: {text}" if self.line else f"{path}: {text}"


class Lines:
    """Where the keys of a file stand."""

    def __init__(self, tree: yaml.Node | None) -> None:
        self._tree = tree

    def of(self, *keys: Key) -> int:
        """The line (from 1) of the deepest key that exists on that way."""
        line, node = 1, self._tree
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                for name, value in node.value:
                    if name.value == str(key):
                        line, node = name.start_mark.line + 1, value
                        break
            elif _has_entry(node, key):
                node = node.value[key]
                line = node.start_mark.line + 1
        return line

    def all(self) -> Mapping[str, int]:
        """Every key and list entry, like "limits.time" and "rules.0", with its line."""
        found = {} if self._tree is None else dict(_walk("", self._tree))
        return MappingProxyType(found)


@dataclass(frozen=True, slots=True)
class Reading(Generic[M]):
    """What came of reading a file."""

    value: M | None
    """None: there are problems."""
    lines: Lines
    problems: tuple[Problem, ...]
    """By line; missing keys last."""


def read(path: Path, error: type[BadInput], what: str, *, most: int = _MOST_BYTES) -> str:
    """The text of a file; `error` in one line if there is none. `what`: "inventory", "policy"."""
    try:
        raw = _bytes(path, most + 1)
        if len(raw) > most:
            raise error(f"{path}: larger than {most >> 20} MiB; that is no {what}")
        return raw.decode("utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "no name that a file can have"
        if isinstance(exc, UnicodeDecodeError):
            reason = "not UTF-8"
        raise error(f"{path}: {reason}") from exc


def _bytes(path: Path, most: int) -> bytes:
    """The beginning of a file, or of what a pipe brings in time. Raises OSError."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(number, "rb", buffering=0) as file:  # noqa: PTH123 - Path has no such flags
        waits = not stat.S_ISREG(os.fstat(number).st_mode)
        poll = select.poll()
        poll.register(number, select.POLLIN)
        until = time.monotonic() + _PIPE_LIMIT
        found = bytearray()
        while len(found) < most:
            left = max(0.0, until - time.monotonic())
            if waits and (left == 0 or not poll.poll(left * 1000)):
                raise TimeoutError(0, f"brought no end of a file in {_PIPE_LIMIT:g} s")
            more = file.read(min(most - len(found), 1 << 16))
            if not more:
                break
            found += more
        return bytes(found)


def examine(text: str, form: type[M], *, empty_values: bool = True) -> Reading[M]:
    """Read a text of that form; what is wrong comes back as problems.

    Without `empty_values`, a key that has none ("stalled_for:") is a problem and no way to write
    the default.
    """
    tree: yaml.Node | None = None
    try:
        loader = _Loader(text)
        try:
            tree = loader.get_single_node()
            data = None if tree is None else loader.construct_document(tree)
        finally:
            loader.dispose()
        if not empty_values and (empty := sorted(_empty(tree), key=lambda one: one.line)):
            return Reading(None, Lines(tree), tuple(empty))
        return Reading(form.model_validate(data), Lines(tree), ())
    except yaml.YAMLError as exc:
        problem = _yaml_problem(exc, text)
    except ValidationError as exc:
        lines = Lines(tree)
        errors = exc.errors(include_url=False)
        found = [_problem(one, lines, form) for one in errors[:_MOST_PROBLEMS]]
        more = len(errors) - len(found)
        rest = [Problem(0, f"wrong in {more} places more")] if more else []
        return Reading(None, lines, (*sorted(found, key=_order), *rest))
    return Reading(None, Lines(tree), (problem,))


def first(problems: tuple[Problem, ...], path: Path) -> str:
    """The first problem in one line, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].at(path) + more


def likely(word: str, words: Collection[str]) -> str:
    """The end of a complaint about an unknown word: the known one that was meant, or all."""
    close = difflib.get_close_matches(word, list(words), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    known = sorted(words)
    more = f" and {len(known) - _MOST_WORDS} more" if len(known) > _MOST_WORDS else ""
    return f"; known are {', '.join(known[:_MOST_WORDS])}{more}"


def shortened(text: str, most: int = _LONGEST_LINE) -> str:
    """A text that is no longer than that, with "..." in place of its end."""
    return text if len(text) <= most else text[: most - 3] + "..."


class _Loader(yaml.SafeLoader):
    """Without what a settings file does not need: aliases, tags, merged and doubled keys, dates."""

    _nodes = _depth = 0

    # A date would become an object that no key takes, and a wrong one an error without a line.
    yaml_implicit_resolvers = {  # noqa: RUF012 – as the base class has it
        start: [(tag, form) for tag, form in resolvers if not tag.endswith(":timestamp")]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        # A few lines of aliases can fill the memory.
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refusal("aliases (&, *) are refused", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _refusal("tags (!) are refused", event.start_mark)
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise _refusal(f"more than {_MOST_NODES} values are refused", event.start_mark)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _refusal("nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            if found := _UNWANTED.search(node.value):
                text = f"control characters ({found[0]!a}) are refused"
                raise _refusal(text, node.start_mark)
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise _refusal("a number that long is refused", node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError):  # 0b_ looks like a number to YAML
            text = f"{node.value!r} is not understood; if it is text, put it in quotes"
            raise _refusal(text, node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key must be a word", key.start_mark)
            if not key.tag.endswith(":str"):  # a number, yes, on, <<
                raise _refusal(f"{key.value} as a key needs quotes", key.start_mark)
            if key.value in keys:
                raise _refusal(f"{key.value!r} is written twice", key.start_mark)
            keys.add(key.value)
        return node


def _refusal(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


def _yaml_problem(exc: yaml.YAMLError, text: str) -> Problem:
    if isinstance(exc, yaml.reader.ReaderError):
        before = text[: exc.position] if isinstance(exc.position, int) else ""
        character = ascii(chr(exc.character)) if isinstance(exc.character, int) else "it"
        return Problem(before.count("\n") + 1, f"control characters ({character}) are refused")
    mark = getattr(exc, "problem_mark", None)
    told = getattr(exc, "problem", None) or str(exc).splitlines()[0]
    if "tag handle" in told:  # with what may be half of a password
        told = "tags (!) are refused"
    return Problem(mark.line + 1 if mark else 0, told)


def _order(problem: Problem) -> tuple[bool, int]:
    """By line, but what is missing last: a misspelt key is the reason more often than not."""
    return problem.text.endswith(" is missing"), problem.line


def _has_entry(node: yaml.Node | None, key: Key) -> TypeGuard[yaml.SequenceNode]:
    return isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value)


def _walk(way: str, node: yaml.Node) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield f"{way}{name.value}", name.start_mark.line + 1
            yield from _walk(f"{way}{name.value}.", value)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{way}{number}", value.start_mark.line + 1
            yield from _walk(f"{way}{number}.", value)


def _empty(tree: yaml.Node | None) -> Iterator[Problem]:
    """A problem for each key without a value."""
    waiting: list[yaml.Node] = [] if tree is None else [tree]
    while waiting:
        here = waiting.pop()
        if isinstance(here, yaml.MappingNode):
            for key, value in here.value:
                if value.tag.endswith(":null"):
                    text = f"{key.value} has no value; write one, or take the key out"
                    yield Problem(key.start_mark.line + 1, text)
                waiting.append(value)
        elif isinstance(here, yaml.SequenceNode):
            waiting.extend(here.value)


_MAY_BE_SECRET = ("lease", "webhooks", "stores")
"""Below these keys there are URLs."""


def _problem(error: Any, lines: Lines, form: type[BaseModel]) -> Problem:
    """One of pydantic's errors in our words."""
    keys: list[Key] = [part for part in error["loc"] if not str(part).startswith(("[", "("))]
    line = lines.of(*keys)
    where = ".".join(str(key) for key in keys) or "the file"
    kind = error["type"]
    if kind == "extra_forbidden":
        *above, unknown = [*keys, error["loc"][-1]][: max(1, len(keys))]
        known = _known(form, above)
        return Problem(line, f"unknown key {str(unknown)!r}{likely(str(unknown), known)}")
    if kind == "missing":
        return Problem(line, f"{where} is missing")
    if kind == "value_error":
        return Problem(line, f"{where}: {error['ctx']['error']}")
    told = _WORDS.get(kind) or error["msg"].lower()
    if keys and keys[0] in _MAY_BE_SECRET:
        return Problem(line, f"{where}: {told}")
    return Problem(line, f"{where}: {told}, not {_short(error['input'])}")


def _known(form: type[BaseModel], keys: list[Key]) -> set[str]:
    """The keys that are allowed below `keys`."""
    schema = _schema(form)
    here = _alternatives(schema, schema)
    for key in keys:
        here = [
            part
            for one in here
            for step in _steps(one, key)
            for part in _alternatives(schema, step)
        ]
    return {name for one in here for name in one.get("properties", {})}


@cache
def _schema(form: type[BaseModel]) -> dict[str, Any]:
    return form.model_json_schema()


def _alternatives(schema: dict[str, Any], node: dict[str, Any]) -> list[dict[str, Any]]:
    """A node of a JSON schema with references and unions resolved."""
    if "$ref" in node:
        return _alternatives(schema, schema["$defs"][node["$ref"].rsplit("/", 1)[-1]])
    below = [*node.get("anyOf", ()), *node.get("oneOf", ())]
    return [node, *(part for one in below for part in _alternatives(schema, one))]


def _steps(node: dict[str, Any], key: Key) -> Iterator[dict[str, Any]]:
    if isinstance(key, int):
        found = node.get("items")
    else:
        found = node.get("properties", {}).get(key, node.get("additionalProperties"))
    if isinstance(found, dict):
        yield found


def _short(value: object) -> str:
    return shortened(repr(value), 40)
