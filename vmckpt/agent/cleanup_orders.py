"""Orders for what a restore leaves to be done; apart, for recovery reads them at every start."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardOrder:
    """Remove the images of a fork on this host."""

    snapshot: str
    images: Mapping[str, str]
    """Where each disk is, by its name in the guest."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "discard"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "DiscardOrder":
        """Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishOrder:
    """See that the disks of a guest that was restored lazily come in to their end."""

    guest: str
    host: str
    dry: bool = False
    """Only look."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "finish-lazy"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "FinishOrder":
        """Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})
