"""How a guest is protected by a standby, as a policy says it. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from vmckpt.units import Seconds


class Failover(StrEnum):
    """Who decides that a guest's host is dead."""

    AUTOMATIC = "automatic"
    """The lease; the leave to stop a guest whose host has lost it. Without a lease store whoever
    keeps watch; the leave to power that host off."""
    MANUAL = "manual"
    """A person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """The section `protect`."""

    interval: Seconds | None = None
    """Between two epochs; None: chosen by what an epoch costs."""
    slowdown: float = 0.10
    """For a chosen interval: most of the guest's time that pauses may take."""
    max_pause: Seconds = Seconds(0.5)
    """A guest that would have to stand still for longer is not protected."""
    hold: Seconds = Seconds(5.0)
    """For so long output waits for a backup that is gone."""
    failover: Failover = Failover.MANUAL
    lease: Seconds = Seconds(5.0)
    """How long a renewal of the lease is good: a database or an agent that is started anew within
    that harms nothing, and a failover takes that much longer. Without a lease store, how long a
    host is silent before it is powered off."""

    def as_json(self) -> dict[str, Any]:
        """Times in seconds."""
        return {**asdict(self), "failover": str(self.failover)}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        """Raises TypeError, ValueError for what is none."""
        return cls(**{**told, "failover": Failover(told["failover"])})
