"""Orders that clean up after a restore.

These orders have a separate module because recovery imports it at every start.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardOrder:
    """Remove the images of a fork on this host."""

    snapshot: str
    images: Mapping[str, str]
    """Image path of each disk, by the disk's name in the guest."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "discard"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "DiscardOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishOrder:
    """Fetch the remaining disk contents of a guest that was restored lazily."""

    guest: str
    host: str
    dry: bool = False
    """Only inspect; change nothing."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "finish-lazy"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "FinishOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})
