"""Read hand-written YAML files strictly. A problem names the line and the key, if known.

The form of a file is a pydantic model that forbids unknown keys. Tags of unions in the model must
be in parentheses ("(word)"), so that messages do not show these tags as keys.
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
# Without a time limit, reading a pipe would block forever if the other end never writes.
_PIPE_LIMIT = 5.0
# Further problems are only counted, because each may need a search through the complete file.
_MOST_PROBLEMS = 100
_LONGEST_NUMBER = 40
_LONGEST_LINE = 500
_MOST_WORDS = 30
# Enough for thousands of hosts. Reading this many nodes takes seconds.
_MOST_NODES = 100_000
_DEEPEST = 50
"""Maximum nesting depth. Valid files have fewer than ten levels."""
# Control characters cause problems in terminals, the journal and libvirt. Surrogates are not
# characters.
_UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

_WORDS = {
    "model_type": "must be a mapping, like {a: b}",
    "dict_type": "must be a mapping, like {a: b}",
    "list_type": "must be a list, like [a, b]",
    "string_type": "must be text; put it in quotes",
    "too_short": "must not be empty",
}
"""Simpler messages for some of pydantic's error types."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a file."""

    line: int
    """Line number, from 1; 0: unknown."""
    text: str
    missing: bool = False
    """Whether a required key is missing."""

    def at(self, path: Path) -> str:
        """Return one line for display, such as "hosts.yaml:7: hosts.beta.uri is missing"."""
        text = shortened(" ".join(self.text.split()))  # a key may contain a line break
        return f"{path}:{self.line}: {text}" if self.line else f"{path}: {text}"


class Lines:
    """The line numbers of the keys in a file."""

    def __init__(self, tree: yaml.Node | None) -> None:
        self._tree = tree

    def of(self, *keys: Key) -> int:
        """Return the line number, from 1, of the deepest existing key on a path of keys.

        Returns 1 if no key on the path exists.
        """
        line, node = 1, self._tree
        for key in keys:
            if isinstance(node, yaml.MappingNode):
                found = [one for one in node.value if one[0].value == str(key)]
                if not found:
                    break
                line, node = found[0][0].start_mark.line + 1, found[0][1]
            elif _has_entry(node, key):
                node = node.value[key]
                line = node.start_mark.line + 1
            else:
                break
        return line

    def all(self) -> Mapping[str, int]:
        """Return the line of each key and list entry, such as "limits.time" or "rules.0"."""
        found = {} if self._tree is None else dict(_walk("", self._tree))
        return MappingProxyType(found)


@dataclass(frozen=True, slots=True)
class Reading(Generic[M]):
    """The result of reading a file."""

    value: M | None
    """The parsed value; None: there are problems."""
    lines: Lines
    problems: tuple[Problem, ...]
    """The problems, sorted by line; missing keys come last. A last entry counts problems beyond the
    first 100."""


def read(
    path: Path,
    error: type[BadInput],
    what: str,
    *,
    most: int = _MOST_BYTES,
    if_missing: str | None = None,
) -> str:
    """Read the text of a file.

    `what`: the kind of file for messages, such as "policy". `most`: maximum size in bytes.
    `if_missing`: the hint if there is no such file. Raises `error` if the file cannot be read, is
    too large, or is not UTF-8.
    """
    try:
        raw = _bytes(path, most + 1)
        if len(raw) > most:
            raise error(f"{path}: the file exceeds {most >> 20} MiB and is not a valid {what}")
        return raw.decode("utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not a valid file name"
        if isinstance(exc, UnicodeDecodeError):
            reason = "not UTF-8"
        hint = if_missing if isinstance(exc, FileNotFoundError) else None
        raise error(f"{path}: {reason}", hint=hint) from exc


def _bytes(path: Path, most: int) -> bytes:
    """Read up to `most` bytes from a file or, within a time limit, from a pipe. Raises OSError."""
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
                raise TimeoutError(0, f"no end of file within {_PIPE_LIMIT:g} s")
            more = file.read(min(most - len(found), 1 << 16))
            if not more:
                break
            found += more
        return bytes(found)


def examine(text: str, form: type[M], *, empty_values: bool = True) -> Reading[M]:
    """Parse YAML text as a form. Returns the value or the problems.

    With `empty_values`, a key without a value ("stalled_for:") is accepted. Otherwise such a key is
    a problem.
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
        rest = [Problem(0, f"{more} more problems")] if more else []
        return Reading(None, lines, (*sorted(found, key=_order), *rest))
    return Reading(None, Lines(tree), (problem,))


def first(problems: tuple[Problem, ...], path: Path) -> str:
    """Return one line with the first problem and the number of further problems."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return problems[0].at(path) + more


def likely(word: str, words: Collection[str]) -> str:
    """Return the end of a message about an unknown word: a similar word or the known words."""
    close = difflib.get_close_matches(word, list(words), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    known = sorted(words)
    more = f" and {len(known) - _MOST_WORDS} more" if len(known) > _MOST_WORDS else ""
    return f"; known: {', '.join(known[:_MOST_WORDS])}{more}"


def shortened(text: str, most: int = _LONGEST_LINE) -> str:
    """Shorten a text to at most `most` characters. "..." replaces the end of a longer text."""
    return text if len(text) <= most else text[: most - 3] + "..."


_REPLACED = (":timestamp", ":int", ":float")
"""Tags whose forms in YAML 1.1 are not used."""
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


class _Loader(yaml.SafeLoader):
    """A YAML loader that rejects aliases, tags, merge keys and duplicate keys.

    Settings files need none of these features. Control characters, deep nesting and too many
    values are also rejected. Numbers are those of YAML 1.2: 010 is ten, while 22:22 and 1_000 are
    text. Dates are loaded as text.
    """

    _nodes = _depth = 0

    # A date object would not be accepted by any key, and an invalid date would cause an error
    # without a line number.
    yaml_implicit_resolvers = {  # noqa: RUF012 – as the base class has it
        start: [(tag, form) for tag, form in resolvers if not tag.endswith(_REPLACED)]
        for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        # A few lines of nested aliases can exhaust the memory.
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refusal("aliases (&, *) are not allowed", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _refusal("tags (!) are not allowed", event.start_mark)
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise _refusal(f"more than {_MOST_NODES} values are not allowed", event.start_mark)
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _refusal("nested too deeply", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.ScalarNode):
            if found := _UNWANTED.search(node.value):
                text = f"control characters ({found[0]!a}) are not allowed"
                raise _refusal(text, node.start_mark)
            if node.tag.endswith((":int", ":float")) and len(node.value) > _LONGEST_NUMBER:
                raise _refusal("this number has too many digits", node.start_mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError):  # a bug in a form above must not end in a traceback
            text = f"{node.value!r} is not a valid value; if it is text, put it in quotes"
            raise _refusal(text, node.start_mark) from None

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value, 16 if node.value.startswith("0x") else 10)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key must be text, not a list or mapping", key.start_mark)
            if not key.tag.endswith(":str"):  # a number, yes, on, <<
                raise _refusal(f"the key {key.value} must be in quotes", key.start_mark)
            if key.value in keys:
                raise _refusal(f"duplicate key {key.value!r}", key.start_mark)
            keys.add(key.value)
        return node


# The patterns match a complete value, as PyYAML adds no end to them.
for _tag, _form in (("int", _INT), ("float", _FLOAT)):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form.pattern})\Z"), list("-+.0123456789")
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refusal(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


def _yaml_problem(exc: yaml.YAMLError, text: str) -> Problem:
    if isinstance(exc, yaml.reader.ReaderError):
        before = text[: exc.position] if isinstance(exc.position, int) else ""
        character = ascii(chr(exc.character)) if isinstance(exc.character, int) else "it"
        return Problem(before.count("\n") + 1, f"control characters ({character}) are not allowed")
    mark = getattr(exc, "problem_mark", None)
    told = getattr(exc, "problem", None) or str(exc).splitlines()[0]
    if "tag handle" in told:  # the message quotes the tag, which may be a part of a password
        told = "tags (!) are not allowed"
    return Problem(mark.line + 1 if mark else 0, told)


def _order(problem: Problem) -> tuple[bool, int]:
    """Return a sort key: by line, but missing keys last, as a misspelt key is often the cause."""
    return problem.missing, problem.line


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
    """Yield a problem for each key without a value."""
    waiting: list[yaml.Node] = [] if tree is None else [tree]
    while waiting:
        here = waiting.pop()
        if isinstance(here, yaml.MappingNode):
            for key, value in here.value:
                if value.tag.endswith(":null"):
                    text = f"{key.value} has no value; add a value, or remove the key"
                    yield Problem(key.start_mark.line + 1, text)
                waiting.append(value)
        elif isinstance(here, yaml.SequenceNode):
            waiting.extend(here.value)


_MAY_BE_SECRET = ("lease", "webhooks", "alertmanagers", "apprise", "stores")
"""Values below these keys are not shown, because they may contain URLs with secrets."""


def _problem(error: Any, lines: Lines, form: type[BaseModel]) -> Problem:
    """Convert a pydantic error to a problem."""
    keys: list[Key] = [part for part in error["loc"] if not str(part).startswith(("[", "("))]
    line = lines.of(*keys)
    where = ".".join(str(key) for key in keys) or "the file"
    kind = error["type"]
    if kind == "extra_forbidden":
        *above, unknown = [*keys, error["loc"][-1]][: max(1, len(keys))]
        known = _known(form, above)
        return Problem(line, f"unknown key {str(unknown)!r}{likely(str(unknown), known)}")
    if kind == "missing":
        return Problem(line, f"{where} is missing", missing=True)
    if kind == "value_error":
        return Problem(line, f"{where}: {error['ctx']['error']}")
    told = _WORDS.get(kind) or error["msg"].lower()
    if keys and keys[0] in _MAY_BE_SECRET:
        return Problem(line, f"{where}: {told}")
    return Problem(line, f"{where}: {told}, not {_short(error['input'])}")


def _known(form: type[BaseModel], keys: list[Key]) -> set[str]:
    """Return the keys that are allowed below `keys`."""
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
    """Return a node of a JSON schema and all its alternatives, with references resolved."""
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
