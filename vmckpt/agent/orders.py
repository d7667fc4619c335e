"""Orders that a controller sends to an agent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vmckpt.model.disk import StorePlace, line_folder


def _fields(told: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """Return an order's fields from its JSON. The fields named in `lists` become tuples.

    Raises KeyError, TypeError.
    """
    fields = {key: value for key, value in told.items() if key != "do"}
    if "store" in fields:
        fields["store"] = StorePlace(**fields["store"])
    if "others" in fields:
        fields["others"] = tuple(StorePlace(**one) for one in fields["others"])
    return {**fields, **{name: tuple(fields[name]) for name in lists}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateOrder:
    """Take a snapshot of a guest on this host."""

    guest: str
    """UUID of the guest."""
    uri: str
    """The libvirt URI to use on the host."""
    host: str
    store: StorePlace
    state: str
    """Directory on the host for files that outlive the agent."""
    snapshot: str
    """ID of the new snapshot."""
    name: str
    by: str
    owner: str
    """Name and token of the lease that the controller holds; empty if it holds no lease."""
    memory: bool
    tags: Mapping[str, str]
    group: str | None
    salt: str | None
    """Salt of the encryption domain, as hex; None: the store is not encrypted."""
    admins: tuple[str, ...]
    """Public keys of the administrators, as hex; the data key is wrapped with each of them."""
    signer: str
    """Public key of the controller, as hex. The controller signs on request."""
    way: str = "auto"
    """Method of capturing memory: see choose_method.MemoryMethod."""

    @property
    def folder(self) -> Path:
        """Directory for captured memory that is not stored yet."""
        return Path(self.state) / "spool" / self.snapshot

    @property
    def line(self) -> Path:
        """Directory of the guest's parent state for `store`."""
        return line_folder(self.state, self.guest, self.store.name)

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON, including the salt. Never log or journal the result."""
        return {**asdict(self), "do": "create"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "CreateOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**_fields(told, "admins"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBackOrder:
    """Undo the changes that an interrupted snapshot left on this host."""

    guest: str
    uri: str
    host: str
    store: StorePlace
    state: str
    snapshot: str
    capture: str | None
    """Undo record of the capture, written before it began; None: the capture had not begun."""
    backup: str | None
    freeze: str | None
    hold: str | None = None
    dry: bool = False
    """Only inspect; change nothing."""

    @property
    def folder(self) -> Path:
        """Directory of the captured memory."""
        return Path(self.state) / "spool" / self.snapshot

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "put-back"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "PutBackOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**_fields(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrder:
    """Restore a snapshot on this host."""

    guest: str
    """UUID of the restored guest."""
    uri: str
    host: str
    store: StorePlace
    state: str
    snapshot: str
    data_key: str | None
    """Data key of the snapshot, as hex; None: the snapshot is not encrypted."""
    trusted: tuple[str, ...]
    """Public keys of the writers whose manifests are trusted, as hex."""
    xml: str | None
    """Domain XML of the guest to start; None: restore only the disks."""
    images: Mapping[str, str]
    """Target path of each disk, by its name in the guest, and of each small file, by its name in
    the snapshot."""
    replace: bool
    """Replace existing images. The guest that used them has been stopped."""
    links_down: bool
    """Start the guest with the links of its network cards down."""
    paused: bool
    others: tuple[StorePlace, ...] = ()
    """Other stores to read from if `store` has lost data."""
    follows: bool = False
    """The guest is not a fork, so this snapshot becomes the parent of its next snapshot."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Guest and format of each image that other guests use, by path. No target path may be one of
    these images or one of their backing files."""
    bases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Base image of each disk that had one, by disk name: see base_images.BaseImage."""

    @property
    def folder(self) -> Path:
        """Directory of the FIFO and sockets of this restore."""
        return Path(self.state) / "spool" / f"restore-{self.snapshot}"

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON, including the data key. Never log or journal the result."""
        return {**asdict(self), "do": "restore"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RestoreOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**_fields(told, "trusted"))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrestoreOrder:
    """Finish or undo an interrupted restore on this host."""

    guest: str
    uri: str
    host: str
    state: str
    snapshot: str
    images: Mapping[str, str]
    made: Mapping[str, str] | None
    """Mark of each disk's new image, by disk name; None: no image had been swapped in yet."""
    empty: tuple[str, ...] = ()
    """Names of the restored files that had no previous version."""
    memory: bool = True
    """The restore was meant to start a guest."""
    dry: bool = False
    """Only inspect; change nothing."""

    @property
    def folder(self) -> Path:
        """Directory of the FIFO and sockets of the restore; see RestoreOrder.folder."""
        return Path(self.state) / "spool" / f"restore-{self.snapshot}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "unrestore"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "UnrestoreOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**_fields(told, "empty"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOrder:
    """Carry out one step of a protection on this host.

    `what` selects the step; `agent.replication.orders` lists the steps. If only some steps read a
    field, the field's docstring names these steps.
    """

    what: str
    guest: str
    uri: str
    host: str
    session: Mapping[str, Any] | None = None
    """`protect`, `stand`: the session as JSON."""
    xml: str = ""
    """`stand`: domain XML of the guest."""
    peer: str = ""
    """`protect`, `stand`: certificate of the other host's agent."""
    wish: str | None = None
    """`ask`: a request for the agent; None: only query the agent's status."""
    leave: str = ""
    """`ask`, if `wish` is a permission to run unprotected: name of the request to grant."""
    owner: str | None = None
    """`end`, `give`, `revive`: ID of the session to act on; None (`end` only): any session."""
    standby_gone: bool = False
    """`end` of a primary: no standby can take over any more."""
    define: bool = True
    """`end`: the guest belongs to this host, so a primary's definition is stored again."""
    state: str = ""
    """`end`: directory of the files that survive a reboot."""
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`before`: path and format of each image, by disk."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`before`: guest and format of each image that other guests use, by path."""
    finder: str = ""
    """`look`: the method for finding changed pages; empty: the best method that works."""
    folder: str = ""
    """`room`: directory for the new images, which may belong to another user."""
    files: Sequence[str] = ()
    """`room`: files that must exist on the host."""

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON, including the lease store's password.

        Never log or journal the result.
        """
        return {**asdict(self), "do": "replica"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ReplicaOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOrder:
    """Count the pages that a guest writes. Ends early, with a last count, if asked to stop."""

    guest: str
    """UUID of the guest."""
    uri: str
    host: str
    times: tuple[float, ...]
    """Seconds after which the pages are counted, ascending."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "count-writes"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "CountOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**_fields(told, "times"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOrder:
    """Send a parent state to another host, or receive a parent state from another host."""

    gives: bool
    guest: str
    """UUID of the guest."""
    store: str
    """Name of the store."""
    state: str
    snapshot: str
    """The snapshot that the parent state describes."""

    @property
    def line(self) -> Path:
        """Directory of the parent state on this host."""
        return line_folder(self.state, self.guest, self.store)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "line"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "LineOrder":
        """Parse an order from its JSON. Raises TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CardsOrder:
    """Replace network cards of a running guest, so that their packets pass through QEMU."""

    what: str
    """`look`: change nothing; `replace`; `finish`: finish an interrupted replacement."""
    guest: str
    """UUID of the guest."""
    uri: str
    host: str
    cards: tuple[str, ...] = ()
    """MAC addresses of the cards to replace; empty: all cards whose output cannot be buffered."""
    dry: bool = False
    """`finish`: only inspect; change nothing."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "cards"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "CardsOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**_fields(told, "cards"))
