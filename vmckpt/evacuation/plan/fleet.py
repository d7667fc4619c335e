"""Hosts and who lives on them, as far as it matters for where a guest may go. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vmckpt.units import Bytes, BytesPerSecond

GBIT = 125_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a host must have for a guest. Guests with equal needs are looked at together."""

    cpu: str | None = None
    """A CPU that the host must be able to offer; None: any host's."""
    machine: str | None = None
    networks: frozenset[str] = frozenset()
    storage: frozenset[str] = frozenset()
    """Shared storage that its disks are on."""
    labels: frozenset[tuple[str, str]] = frozenset()
    """That the host must carry."""
    only: frozenset[str] | None = None
    """Hosts it is pinned to; None: all."""
    never: frozenset[tuple[str, str]] = frozenset()
    """Hosts it must not be on, and why: its own standby is there, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who takes room on a host: a guest, or the standby of one that runs elsewhere."""

    name: str
    host: str
    memory: Bytes
    """Its own and its QEMU's."""
    cpus: float = 0.0
    """Cores that it is counted with."""
    needs: Needs = field(default_factory=Needs)
    apart: frozenset[str] = frozenset()
    """Groups of which no two may be on one host."""
    priority: int = 0
    """Higher ones go first."""
    stays: str | None = None
    """Why it cannot be moved; None: it can."""
    prefers: frozenset[tuple[str, str]] = frozenset()
    """Labels of hosts where it would rather be."""
    size: Bytes = Bytes(0)
    """What has to travel; 0: as much as its memory."""
    dirty: BytesPerSecond = BytesPerSecond(0)
    most: BytesPerSecond | None = None
    """Its stream carries no more, however wide the network is; None: not known."""

    @property
    def travels(self) -> Bytes:
        """Bytes that one pass over it sends."""
        return self.size or self.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One host."""

    name: str
    memory: Bytes
    """For guests, standbys and what is on its way there."""
    cpus: float
    """Cores that guests may be counted with in all."""
    offers: frozenset[str] = frozenset()
    """CPUs."""
    machines: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()
    storage: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    closed: str | None = None
    """Why nothing is placed there; None: it may be."""
    link: BytesPerSecond = BytesPerSecond(10 * GBIT)
    """What its network carries of migrations, each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What makes one host better than another, all hard rules kept."""

    spread: float = 1.0
    """Equal loads everywhere; negative: few hosts, well filled."""
    prefer: float = 1.0
    """Labels that a guest prefers."""
    stay_near: float = 0.2
    """Hosts that share more of the storage that the guest's present host has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a plan keeps to."""

    keep_free: float = 0.1
    """Of each host's memory, also while guests are on their way."""
    weights: Weights = field(default_factory=Weights)
    may_displace: bool = True
    """Guests of other hosts may be moved to make room."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of it at one moment."""

    places: tuple[Place, ...]
    tenants: tuple[Tenant, ...]

    def place(self, name: str) -> Place:
        """By name. Raises KeyError."""
        return next(one for one in self.places if one.name == name)
