"""Check the answers of a protection's agents, since a host may send anything. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET

from vmckpt.hypervisor import domain_xml

_TEXTS = frozenset({
    "role", "phase", "outcome", "why", "says", "session", "peer", "name", "guest", "host", "finder",
    "finder_why", "enforced_by", "enforced_why", "interval_why", "wants_leave", "state", "uuid",
})  # fmt: skip
_NUMBERS = frozenset({
    "at", "epoch", "packets_lost", "pages_left", "sent", "committed", "since", "taken",
    "pages_copied",
})  # fmt: skip
_UNITS = ("_s", "_bytes")
_MAPPINGS = frozenset({"median", "last", "standby", "test", "given"})
_LISTS = frozenset({"recent"})
_LONGEST = 4000
"""Maximum length of a text, in characters."""
_LARGEST = 1e18
_DEEPEST = 8
"""Maximum nesting; vmckpt's own answers have fewer than four levels."""
_MOST = 10_000
"""Maximum number of entries in a list."""

Kind = Callable[[str, object], None]
"""Checks a field's value. Raises ValueError, with the field's name, for a wrong type."""


def require_answers(order: str, told: object) -> None:
    """Check that the answer `told` to `order` has the fields that vmckpt reads, of the right types.

    `order`: the name of an order, such as "look" (agent/replication/orders.py). The answer to "ask"
    may lack any field. Answers to orders without such fields are not checked. Raises ValueError.
    """
    if order == "ask":
        _check_status(_mapping("the answer", told))
    elif order in _ANSWERS:
        _ANSWERS[order]("the answer", told)


def _check_status(told: Mapping[str, Any], *, depth: int = 0) -> None:
    """Check every field whose name is known. `depth`: number of levels above `told`.

    Raises ValueError.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    for key, value in told.items():
        if value is not None:
            _check(key, value, depth)


def _check(key: str, value: object, depth: int) -> None:
    if key in _TEXTS:
        _text(key, value)
    elif key in _NUMBERS or key.endswith(_UNITS):
        if not _is_number(value):
            raise _wrong(key, value)
    elif key in _MAPPINGS:
        _check_status(_mapping(key, value), depth=depth + 1)
    elif key in _LISTS:
        if not isinstance(value, Sequence):
            raise _wrong(key, value)
        for one in value:
            _check_status(_mapping(key, one), depth=depth + 1)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) <= _LARGEST


def _wrong(field: str, value: object) -> ValueError:
    return ValueError(f"{field} {str(value)[:40]}")


def _mapping(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(field, value)
    return value


def _text(field: str, value: object) -> None:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise _wrong(field, value)


def _count(field: str, value: object) -> None:
    if domain_xml.count(value, field) > _LARGEST:
        raise _wrong(field, value)


def _number(field: str, value: object) -> None:
    if not _is_number(value):
        raise _wrong(field, value)


def _block(field: str, value: object) -> None:
    """Check a block of memory: its name and its size. Raises ValueError."""
    if not isinstance(value, list) or len(value) != 2:
        raise _wrong(field, value)
    _text(field, value[0])
    _count(field, value[1])


def _flag(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _wrong(field, value)


def _definition(field: str, value: object) -> None:
    try:
        domain_xml.tree(value if isinstance(value, str) else "", "domain")
    except (ValueError, ET.ParseError) as exc:
        raise ValueError(f"{field}: {exc}") from exc


def _or_nothing(kind: Kind) -> Kind:
    def check_it(field: str, value: object) -> None:
        if value not in (None, ""):
            kind(field, value)

    return check_it


def _each(kind: Kind, *, exactly: int | None = None) -> Kind:
    def check_each(field: str, value: object) -> None:
        if not isinstance(value, list) or len(value) > _MOST:
            raise _wrong(field, value)
        if exactly not in (None, len(value)):
            raise _wrong(field, value)
        for one in value:
            kind(field, one)

    return check_each


def _by_name(kind: Kind) -> Kind:
    def check_all(field: str, value: object) -> None:
        for name, one in _mapping(field, value).items():
            kind(f"{field}: {name}", one)

    return check_all


def _fields(**kinds: Kind) -> Kind:
    def check_fields(field: str, value: object) -> None:
        told = _mapping(field, value)
        for name, kind in kinds.items():
            if name not in told:
                raise ValueError(f"{field} has no {name}")
            kind(name, told[name])

    return check_fields


_DISK = _fields(
    name=_text, kind=_text, device=_text, format=_text, source=_or_nothing(_text), read_only=_flag,
    shareable=_flag, size=_or_nothing(_count), node=_or_nothing(_text),
)  # fmt: skip
_IMAGE = _fields(
    path=_text, there=_flag, regular=_flag, size=_or_nothing(_count), says=_text, user=_text
)
_ANSWERS: Mapping[str, Kind] = {
    "look": _fields(
        name=_text, undo=_text, cards=_each(_text), memory=_each(_count), xml=_definition,
        private=_or_nothing(_each(_block)),
        epoch_cost=_fields(finder=_text, why=_text, scan=_or_nothing(_number), written=_count),
        devices=_fields(names=_each(_text), digest=_text),
        room=_count, disk_logs=_flag, definition=_or_nothing(_definition), autostart=_flag,
        qemu=_text, disks=_each(_DISK),
    ),
    "room": _fields(memory=_count, images=_count, images_device=_text, missing=_each(_text)),
    "before": _fields(runs=_flag, images=_by_name(_IMAGE)),
    "identity": _fields(certificate=_text, owner=_each(_count, exactly=2)),
    "stand": _fields(port=_count),
    "end": _fields(did=_each(_text)), "revive": _fields(did=_each(_text)),
}  # fmt: skip
"""The fields that vmckpt reads from the answer to each order."""
