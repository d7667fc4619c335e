"""Where snapshots are kept."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """One store of the inventory."""

    name: str
    url: str
    """A folder that the hosts see under the same path, or s3://bucket/prefix?endpoint=…"""
