"""Orders about families of forks: guests that continue from one snapshot, at what they touch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vmckpt.agent.orders import RestoreOrder
from vmckpt.model.disk import StorePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkChild:
    """A fork to start."""

    guest: str
    """UUID of the fork."""
    name: str
    xml: str
    """Domain XML of the fork."""
    images: Mapping[str, str]
    """Target path of each disk and small file, as in RestoreOrder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOrder(RestoreOrder):
    """Restore one fork of a family."""

    @property
    def folder(self) -> Path:
        """Directory of the FIFO of this fork: several forks start from a snapshot at once."""
        return Path(self.state) / "spool" / f"fork-{self.guest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """Start a family of forks on this host. All forks have their links down.

    The result is {"children": [{"guest", "name", "took", "clock_not_set", "error"}], "took"}: for
    each child, the seconds until it was running, and why it was not started (empty: it is running).
    """

    family: str
    """ID of the family, unique on the host."""
    template: str
    """Name of the guest in the snapshot."""
    uri: str
    host: str
    store: StorePlace
    state: str
    """Directory on the host for files that outlive the agent."""
    snapshot: str
    data_key: str | None
    """Data key of the snapshot, as hex; None: the snapshot is not encrypted."""
    trusted: tuple[str, ...]
    """Public keys of the writers whose manifests are trusted, as hex."""
    children: tuple[ForkChild, ...]
    others: tuple[StorePlace, ...] = ()
    """Other stores to read from if `store` has lost data."""

    def child_order(self, index: int) -> "ChildOrder":
        """Return the order that restores one child."""
        child = self.children[index]
        return ChildOrder(
            guest=child.guest, uri=self.uri, host=self.host, store=self.store, state=self.state,
            snapshot=self.snapshot, data_key=self.data_key, trusted=self.trusted, xml=child.xml,
            images=child.images, replace=False, links_down=True, paused=False, others=self.others,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON, including the data key. Never log or journal the result."""
        return {**asdict(self), "do": "fork"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ForkOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        fields = {key: value for key, value in told.items() if key != "do"}
        return cls(**{
            **fields, "store": StorePlace(**fields["store"]), "trusted": tuple(fields["trusted"]),
            "others": tuple(StorePlace(**one) for one in fields["others"]),
            "children": tuple(ForkChild(**one) for one in fields["children"]),
        })  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FamiliesOrder:
    """List the families on this host.

    The result is {"families": [{"family", "template", "snapshot", "store", "children": [{"guest",
    "name", "runs", "memory_bytes", "disk_bytes"}]}]}: for each child whether it is running, and the
    memory and disk space that it does not share with the snapshot.
    """

    uri: str
    host: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "families"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "FamiliesOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DropForksOrder:
    """Destroy forks of families on this host, and remove their disks.

    The result is {"dropped": [UUID]}. Forks that do not exist any more are ignored.
    """

    uri: str
    host: str
    guests: tuple[str, ...]
    """UUIDs of the forks."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "drop-forks"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "DropForksOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        fields = {key: value for key, value in told.items() if key != "do"}
        return cls(**{**fields, "guests": tuple(fields["guests"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepForkOrder:
    """Make a fork independent: copy all its memory and disks, and store its definition.

    Sends progress in the phases "memory" and "disks". The result is {"kept": true}.
    """

    uri: str
    host: str
    guest: str
    """UUID of the fork."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "keep-fork"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "KeepForkOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})
