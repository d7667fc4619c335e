"""The pieces of work that a service carries out, as frozen dataclasses. Pure."""

from dataclasses import dataclass
from typing import ClassVar

from vmckpt.policy.model import Check
from vmckpt.units import show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSnapshot:
    """Take a snapshot."""

    what: ClassVar[str] = "take"
    """Name of this kind of work in the output of `run --json`."""
    guest: str
    """The guest's UUID."""
    name: str
    host: str
    store: str
    policy: str
    schedule: str
    memory: bool

    @property
    def lane(self) -> str:
        """The lane; only one piece of work per lane is in progress at a time."""
        return f"host {self.host}"

    @property
    def key(self) -> str:
        """The key under which failures are recorded."""
        return self.key_of(self.guest, self.schedule)

    @staticmethod
    def key_of(guest: str, schedule: str) -> str:
        """Return the key for a guest, given by its UUID, and a schedule."""
        return f"take {guest} {schedule}"

    def __str__(self) -> str:
        return f"snapshot of {self.name} ({self.schedule}) into {self.store}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySnapshot:
    """Copy a snapshot to another store."""

    what: ClassVar[str] = "copy"
    id: str
    name: str
    """The guest's name."""
    source: str
    target: str

    @property
    def lane(self) -> str:
        return f"copy {self.target}"

    @property
    def key(self) -> str:
        return f"copy {self.id} {self.target}"

    def __str__(self) -> str:
        return f"copy of snapshot {self.id} ({self.name}) to {self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSnapshots:
    """Delete a guest's snapshots of one schedule that no retention rule keeps."""

    what: ClassVar[str] = "prune"
    store: str
    ids: tuple[str, ...]
    """Snapshot IDs, oldest first."""
    schedule: str
    name: str

    @property
    def lane(self) -> str:
        return f"prune {self.store}"

    @property
    def key(self) -> str:
        return f"prune {self.store} {self.name} {self.schedule}"

    def __str__(self) -> str:
        return f"pruning of snapshots of {self.name} ({self.schedule}) in {self.store}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySnapshots:
    """Verify snapshots."""

    what: ClassVar[str] = "verify"
    store: str
    ids: tuple[str, ...]
    depth: Check

    @property
    def lane(self) -> str:
        return f"verify {self.store}"

    @property
    def key(self) -> str:
        return f"{self.lane} {self.depth}"

    def __str__(self) -> str:
        count = show_count(len(self.ids), "snapshot")
        return f"verification of {count} in {self.store} ({self.depth})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectGarbage:
    """Remove data that no snapshot needs."""

    what: ClassVar[str] = "collect"
    store: str

    @property
    def lane(self) -> str:
        return f"collect {self.store}"

    @property
    def key(self) -> str:
        return self.lane

    def __str__(self) -> str:
        return f"garbage collection in {self.store}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateGroup:
    """Take snapshots of several guests at one instant."""

    what: ClassVar[str] = "cut"
    guests: tuple[tuple[str, str, str], ...]
    """UUID, name and host of each guest."""
    store: str
    policy: str
    schedule: str

    @property
    def lane(self) -> str:
        return f"group {self.policy}/{self.schedule}"

    @property
    def lanes(self) -> frozenset[str]:
        """All lanes that the group occupies, since a busy host would delay all members."""
        return frozenset({self.lane, *(f"host {host}" for _, _, host in self.guests)})

    @property
    def key(self) -> str:
        return f"take {self.lane}"

    def __str__(self) -> str:
        names = ", ".join(name for _, name, _ in self.guests)
        return f"snapshot of {names} as a group ({self.schedule}) into {self.store}"


Work = (
    CreateSnapshot | CreateGroup | CopySnapshot | PruneSnapshots | VerifySnapshots | CollectGarbage
)
