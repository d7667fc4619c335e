"""What a table's columns are. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Cell = tuple[str, str]
"""A text and its tone: "", "good", "warn", "bad", "dim" or "bold"."""
TONES = ("good", "warn", "bad", "dim", "bold")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[T]):
    """One column."""

    label: str
    cell: Callable[[T], Cell]
    order: Callable[[T], object] | None = None
    """What it is sorted by; None: it cannot be."""
    width: int = 8
    grows: int = 0
    """Its share of what is left over."""
    right: bool = False
    from_width: int = 0
    """It is only there on a screen at least so wide."""
