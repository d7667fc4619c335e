"""Hosts and their guests, with the properties that decide where a guest may move. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vmckpt.units import Bytes, BytesPerSecond

GBIT = 125_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A guest's requirements for its host. Guests with equal needs are examined together."""

    cpu: str | None = None
    """A CPU that the host must offer; None: any CPU."""
    machine: str | None = None
    networks: frozenset[str] = frozenset()
    storage: frozenset[str] = frozenset()
    """Names of the guest's files that the host must share."""
    labels: frozenset[tuple[str, str]] = frozenset()
    """Labels that the host must have."""
    only: frozenset[str] | None = None
    """The only hosts that the guest may move to; None: any host."""
    never: frozenset[tuple[str, str]] = frozenset()
    """Hosts on which the guest must not run, with the reason: for example, its standby is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A user of a host's memory: a guest, or the standby of a guest that runs elsewhere."""

    name: str
    host: str
    memory: Bytes
    """Memory used by the guest and its QEMU process, in total; 0 if the guest is off."""
    cpus: float = 0.0
    """Number of cores counted for the guest."""
    needs: Needs = field(default_factory=Needs)
    apart: frozenset[str] = frozenset()
    """Anti-affinity groups: two guests of the same group may not share a host."""
    priority: int = 0
    """Guests with a higher priority move first."""
    stays: str | None = None
    """Why the guest cannot be moved; None if it can."""
    prefers: frozenset[tuple[str, str]] = frozenset()
    """Host labels that the guest prefers."""
    size: Bytes = Bytes(0)
    """Bytes to be sent; 0: the size of its memory."""
    dirty: BytesPerSecond = BytesPerSecond(0)
    most: BytesPerSecond | None = None
    """Maximum bandwidth of its stream, regardless of the network; None if unknown."""

    @property
    def travels(self) -> Bytes:
        """Bytes sent by one pass over the guest."""
        return self.size or self.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A host."""

    name: str
    memory: Bytes
    """Memory for guests, standbys and incoming migrations."""
    cpus: float
    """Maximum number of cores counted for all its guests together."""
    offers: frozenset[str] = frozenset()
    """CPUs that the host can offer."""
    machines: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()
    storage: frozenset[str] = frozenset()
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    closed: str | None = None
    """Why no guest may be placed on the host; None if guests may be placed there."""
    link: BytesPerSecond = BytesPerSecond(10 * GBIT)
    """Bandwidth of its network for migrations, in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of the criteria that rank the allowed hosts of a guest."""

    spread: float = 1.0
    """Weight of equal loads; if negative, guests are packed onto few hosts."""
    prefer: float = 1.0
    """Weight of the labels that a guest prefers."""
    stay_near: float = 0.2
    """Weight of hosts that share storage with the guest's current host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of a plan."""

    keep_free: float = 0.1
    """Fraction of each host's memory that stays free, even while guests are moving."""
    weights: Weights = field(default_factory=Weights)
    may_displace: bool = True
    """Whether guests of other hosts may be moved to make room."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All hosts and guests at one instant."""

    places: tuple[Place, ...]
    tenants: tuple[Tenant, ...]

    def place(self, name: str) -> Place:
        """Return a host by name. Raises StopIteration if there is no such host."""
        return next(one for one in self.places if one.name == name)
