"""How a host is emptied, as a policy says it. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from vmckpt.units import Seconds


class Strategy(StrEnum):
    """What becomes of a guest whose host is emptied."""

    MIGRATE = "migrate"
    SHUT_DOWN = "shutdown-and-return"
    """It is shut down, and started again when the host is back."""
    SUSPEND = "suspend-to-snapshot"
    """Its memory is saved on its host, and it goes on there when the host is back."""
    LEAVE = "leave"
    """It stays where it is, and the host is not empty then."""

    @property
    def stops(self) -> bool:
        """The guest does not run meanwhile."""
        return self in (Strategy.SHUT_DOWN, Strategy.SUSPEND)


class Order(StrEnum):
    """Who goes first among those of one priority."""

    SMALLEST = "smallest-first"
    LONGEST = "longest-first"
    """What takes longest: nothing long is left for the end."""
    NAME = "by-name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evacuation:
    """The section `evacuate`. A guest's own policy says what becomes of it; the policy that a host
    is emptied by says how."""

    strategy: Strategy = Strategy.MIGRATE
    move_shut_off: bool = True
    """A guest that is off is defined on another host."""
    priority: int = 0
    """Higher ones go first."""
    apart: tuple[str, ...] = ()
    """Labels: no two guests that have the same value of one of them may be on one host."""
    needs: tuple[tuple[str, str], ...] = ()
    """Labels that a host must have."""
    prefers: tuple[tuple[str, str], ...] = ()
    shutdown: Seconds = Seconds(120.0)
    """How long a guest may take to shut down."""
    order: Order = Order.LONGEST
    per_source: int = 2
    per_target: int = 2
    at_once: int = 16
    keep_free: float = 0.1
    """Of each target's memory, also while guests are on their way."""
    cpu_overcommit: float = 16.0
    """CPUs that guests may have for each of the host's. 16: what OpenStack Nova has as default."""
    spread: float = 1.0
    prefer: float = 1.0
    stay_near: float = 0.2
    displace: bool = False
    """Guests of other hosts may be moved to make room."""
    tries: int = 3
    """For each guest, in all."""
    first_wait: Seconds = Seconds(10.0)
    """After a guest's first failure; twice as long after each that follows."""
