"""Orders that a controller sends to an agent."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vmckpt.model.disk import StorePlace, line_folder


def _fields(told: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """Return an order's fields from JSON, with `lists` as tuples. Raises KeyError, TypeError."""
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
    """URI of libvirt, as seen on the host."""
    host: str
    store: StorePlace
    state: str
    """Folder on the host for files that outlive the agent."""
    snapshot: str
    """ID of the new snapshot."""
    name: str
    by: str
    owner: str
    """Token of the lease."""
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
        """Folder of the captured memory until it is stored."""
        return Path(self.state) / "spool" / self.snapshot

    @property
    def line(self) -> Path:
        """Folder of the guest's parent state for that store."""
        return line_folder(self.state, self.guest, self.store.name)

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON. It contains the salt: never log it or put it in the journal."""
        return {**asdict(self), "do": "create"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "CreateOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**_fields(told, "admins"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBackOrder:
    """Undo whatever an interrupted snapshot has left on this host."""

    guest: str
    uri: str
    host: str
    store: StorePlace
    state: str
    snapshot: str
    capture: str | None
    """Undo record that the capture wrote before it began; None: it had not begun."""
    backup: str | None
    freeze: str | None
    hold: str | None = None
    dry: bool = False
    """Only inspect; change nothing."""

    @property
    def folder(self) -> Path:
        """Folder of the captured memory."""
        return Path(self.state) / "spool" / self.snapshot

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "put-back"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "PutBackOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
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
    """Data key of the snapshot, as hex; None: it is not encrypted."""
    trusted: tuple[str, ...]
    """Public keys of the writers whose manifests are trusted, as hex."""
    xml: str | None
    """Definition to start the guest with; None: restore its disks only."""
    images: Mapping[str, str]
    """Paths to restore to: of disks, by name in the guest, and of small files, by name in the
    snapshot."""
    replace: bool
    """Replace existing images; the guest that used them has ended."""
    links_down: bool
    """Start the guest with the links of its network cards down."""
    paused: bool
    others: tuple[StorePlace, ...] = ()
    """Other stores, which are read if that one has lost data."""
    follows: bool = False
    """The guest is the original one, not a fork: this snapshot is the parent of its next one."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Guest and format of each image of other guests. No path to restore to may be such an image,
    or be in its backing chain."""

    @property
    def folder(self) -> Path:
        """Folder of the FIFO and sockets of this restore."""
        return Path(self.state) / "spool" / f"restore-{self.snapshot}"

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON. It contains the data key: never log it or put it in the
        journal."""
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
    """Marks of the disks' new images, by name; None: no image had been swapped in yet."""
    empty: tuple[str, ...] = ()
    """Names of the files that replaced nothing."""
    memory: bool = True
    """The restore was to start a guest."""
    dry: bool = False
    """Only inspect; change nothing."""

    @property
    def folder(self) -> Path:
        """Folder of the FIFO and sockets of that restore; see RestoreOrder.folder."""
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

    `what` selects the step; `agent.replication.orders` lists them. Which other fields a step reads
    is noted below.
    """

    what: str
    guest: str
    uri: str
    host: str
    session: Mapping[str, Any] | None = None
    """The session as JSON."""
    xml: str = ""
    peer: str = ""
    """Certificate of the other host's agent."""
    wish: str | None = None
    leave: str = ""
    """`ask`, with the wish to run unprotected: the name of the request that it grants."""
    owner: str | None = None
    """`end`: only end a protection of this session; None: end any."""
    standby_gone: bool = False
    """`end` of a primary: no standby is left that could take over."""
    define: bool = True
    """`end` of a primary: the guest stays on this host, and its definition is stored again."""
    state: str = ""
    """`end`: folder of the files that outlive a reboot."""
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`before`: path and format of each image, by disk."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """`before`: guest and format of each image of other guests."""
    folder: str = ""
    """`room`: folder for the new images. Its owner may be another user."""
    files: Sequence[str] = ()
    """`room`: files that must exist on the host."""

    def as_json(self) -> dict[str, Any]:
        """Return the order as JSON. It contains the password of the lease store: never log it or
        put it in the journal."""
        return {**asdict(self), "do": "replica"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ReplicaOrder":
        """Parse an order from its JSON. Raises KeyError, TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})
