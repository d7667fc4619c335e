"""What an agent is told to do, as its controller writes it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vmckpt.model.disk import StorePlace, line_folder


def _fields(told: Mapping[str, Any], *lists: str) -> dict[str, Any]:
    """An order's fields out of its JSON; those named are tuples. Raises KeyError, TypeError."""
    fields = {key: value for key, value in told.items() if key != "do"}
    if "store" in fields:
        fields["store"] = StorePlace(**fields["store"])
    if "others" in fields:
        fields["others"] = tuple(StorePlace(**one) for one in fields["others"])
    return {**fields, **{name: tuple(fields[name]) for name in lists}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateOrder:
    """Take a snapshot of a guest that runs on this host."""

    guest: str
    """Its UUID."""
    uri: str
    """libvirt's, as seen on the host."""
    host: str
    store: StorePlace
    state: str
    """A folder on the host for what outlives the agent."""
    snapshot: str
    """The id it gets."""
    name: str
    by: str
    owner: str
    """Token of the lease."""
    memory: bool
    tags: Mapping[str, str]
    group: str | None
    salt: str | None
    """The domain's, as hex; None: nothing is encrypted."""
    admins: tuple[str, ...]
    """Public keys as hex, for whom the data key is wrapped."""
    signer: str
    """The controller's public key, as hex: it signs when it is asked."""
    way: str = "auto"
    """How memory is captured: see choose_method.MemoryMethod."""

    @property
    def folder(self) -> Path:
        """Where captured memory is laid down until it is stored."""
        return Path(self.state) / "spool" / self.snapshot

    @property
    def line(self) -> Path:
        """Where the line state of the guest in that store is."""
        return line_folder(self.state, self.guest, self.store.name)

    def as_json(self) -> dict[str, Any]:
        """With the domain's salt: for the host, and for no log or journal."""
        return {**asdict(self), "do": "create"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "CreateOrder":
        """Raises KeyError, TypeError."""
        return cls(**_fields(told, "admins"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PutBackOrder:
    """See that nothing of a snapshot's taking is left on this host."""

    guest: str
    uri: str
    host: str
    store: StorePlace
    state: str
    snapshot: str
    capture: str | None
    """What the capture noted before it began; None: it had not begun."""
    backup: str | None
    freeze: str | None
    hold: str | None = None
    dry: bool = False
    """Only look."""

    @property
    def folder(self) -> Path:
        """Where captured memory was laid down."""
        return Path(self.state) / "spool" / self.snapshot

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "put-back"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "PutBackOrder":
        """Raises KeyError, TypeError."""
        return cls(**_fields(told))


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOrder:
    """Bring a snapshot back to life on this host."""

    guest: str
    """The UUID it has from now on."""
    uri: str
    host: str
    store: StorePlace
    state: str
    snapshot: str
    data_key: str | None
    """As hex; None: it is not encrypted."""
    trusted: tuple[str, ...]
    """Public keys of writers whose manifests are believed, as hex."""
    xml: str | None
    """What the guest is started with; None: only its disks are wanted."""
    images: Mapping[str, str]
    """Where each disk is to be, by its name in the guest, and each small file, by its name in the
    snapshot."""
    replace: bool
    """Images that are there are replaced; the guest that used them has ended."""
    links_down: bool
    """Nobody hears of it on the network."""
    paused: bool
    others: tuple[StorePlace, ...] = ()
    """Stores that are asked for what that one has lost."""
    follows: bool = False
    """It is the guest itself: its next snapshot goes on from this one."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Images of other guests with their guest and format: none of ours may be, or be below, one."""

    @property
    def folder(self) -> Path:
        """For the FIFO and sockets of this one restore."""
        return Path(self.state) / "spool" / f"restore-{self.snapshot}"

    def as_json(self) -> dict[str, Any]:
        """With the snapshot's key: for the host, and for no log or journal."""
        return {**asdict(self), "do": "restore"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "RestoreOrder":
        """Raises KeyError, TypeError."""
        return cls(**_fields(told, "trusted"))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrestoreOrder:
    """See that a restore that was interrupted is either whole or not there, on this host."""

    guest: str
    uri: str
    host: str
    state: str
    snapshot: str
    images: Mapping[str, str]
    made: Mapping[str, str] | None
    """Marks of the disks' new images, by name; None: none had been put in its place yet."""
    empty: tuple[str, ...] = ()
    """Where nothing was before, by name."""
    memory: bool = True
    """A guest was to be started from it."""
    dry: bool = False
    """Only look."""

    @property
    def folder(self) -> Path:
        """See RestoreOrder.folder."""
        return Path(self.state) / "spool" / f"restore-{self.snapshot}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "do": "unrestore"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "UnrestoreOrder":
        """Raises KeyError, TypeError."""
        return cls(**_fields(told, "empty"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOrder:
    """One of them."""

    what: str
    """See `agent.replication.orders`."""
    guest: str
    uri: str
    host: str
    session: Mapping[str, Any] | None = None
    """As Session's JSON."""
    xml: str = ""
    peer: str = ""
    """The other agent's certificate."""
    wish: str | None = None
    leave: str = ""
    """With a wish to go on alone: the name that it was asked for under."""
    owner: str | None = None
    """To end: only a protection of this session; None: any."""
    standby_gone: bool = False
    """To end a primary: nothing is left that could take over."""
    define: bool = True
    """To end a primary: the guest is this host's again, and gets its definition back."""
    state: str = ""
    """To end: where what outlives a reboot was kept."""
    images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """To look at what was there before: path and format of each, by disk."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Images of other guests with their guest and format."""
    folder: str = ""
    """To look for room: where images are to be made, perhaps another user's."""
    files: Sequence[str] = ()
    """To look for room: files that must be there, too."""

    def as_json(self) -> dict[str, Any]:
        """With the lease's password: for the host, and for no log or journal."""
        return {**asdict(self), "do": "replica"}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "ReplicaOrder":
        """Raises KeyError, TypeError."""
        return cls(**{key: value for key, value in told.items() if key != "do"})
