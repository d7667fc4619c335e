"""How the changed pages of a protected guest are found, and what this costs. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import Bytes, Seconds


class Finder(StrEnum):
    """Methods to find changed pages."""

    WRITE_TRACKING = "write-tracking"
    SOFT_DIRTY = "soft-dirty"
    COMPARE = "compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCost:
    """The method that finds a guest's changed pages, and its measured cost."""

    finder: Finder
    why: str = ""
    """Why a better method cannot be used; empty if the method is the best one or was chosen."""
    scan: Seconds | None = None
    """Time to find the changed pages; None: not measured."""
    written: Bytes = Bytes(0)
    """Size of the pages that the guest wrote in 0.1 s."""
