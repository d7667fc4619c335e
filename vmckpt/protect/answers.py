"""What a protection's agents may answer: a host may answer anything. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_TEXTS = frozenset({
    "role", "phase", "outcome", "why", "says", "session", "peer", "name", "guest", "host", "finder",
    "finder_why", "enforced_by", "enforced_why", "interval_why", "wants_leave", "state", "uuid",
})  # fmt: skip
_NUMBERS = frozenset({
    "epoch", "packets_lost", "pages_left", "sent", "committed", "since", "taken", "pages_copied",
})  # fmt: skip
_UNITS = ("_s", "_bytes")
_MAPPINGS = frozenset({"median", "last", "standby", "test", "given"})
_LISTS = frozenset({"recent"})
_LONGEST = 4000
"""Characters of a text."""
_LARGEST = 1e18
_DEEPEST = 8
"""Levels; no answer of ours has four."""


def check(told: Mapping[str, Any], *, depth: int = 0) -> None:
    """Raises ValueError if anything that is known by its name is of another kind.

    `depth`: levels above `told`.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    for key, value in told.items():
        if value is not None:
            _check(key, value, depth)


def _check(key: str, value: object, depth: int) -> None:
    good = True
    if key in _TEXTS:
        good = isinstance(value, str) and len(value) <= _LONGEST
    elif key in _NUMBERS or key.endswith(_UNITS):
        good = _is_number(value)
    elif key in _MAPPINGS:
        good = isinstance(value, Mapping)
        check(value if isinstance(value, Mapping) else {}, depth=depth + 1)
    elif key in _LISTS:
        good = isinstance(value, Sequence) and all(isinstance(one, Mapping) for one in value)
        for one in value if isinstance(value, Sequence) and good else ():
            check(one, depth=depth + 1)
    if not good:
        raise ValueError(f"{key} {str(value)[:40]}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and abs(value) <= _LARGEST
