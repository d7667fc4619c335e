"""Orders that clean up after a restore.

They have a module of their own because recovery imports them at every start.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardOrder:
    """Remove the images of a fork on this host."""

    snapshot: str
    images: Mapping[str, str]
    """Path of each disk's image, by its name in the guest."""

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
