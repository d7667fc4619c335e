"""Where snapshots are kept."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """One store of the inventory."""

    name: str
    url: str
    """A folder that the hosts see under the same path, or s3://bucket/prefix?endpoint=…"""
    id: str | None = None
    """The store's own, as the controller has read it there; None: it was not looked at."""


def line_folder(state: str, guest: str, store: str) -> Path:
    """Where a host that keeps its state there has the line of a guest (its UUID) in a store."""
    return Path(state) / "lines" / f"{guest}-{store}"
