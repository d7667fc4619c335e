"""A controller's lease on a job: heartbeats, tokens, and when the lease has expired. Pure."""

from dataclasses import dataclass

from vmckpt.units import Seconds

HEARTBEAT = Seconds(5.0)
"""Interval between the heartbeats of a controller."""
TTL = Seconds(30.0)
"""How long a heartbeat of a controller on another machine is valid."""
MARGIN = Seconds(2.0)
"""A controller stops acting this long before another controller may take over, since clock rates
differ."""


def abandoned(alive: bool | None, alive_until: float | None, now: float) -> bool:
    """Return whether an operation has no live controller.

    `alive`: whether the controller's process exists; None if the controller is on another machine.
    In that case, `alive_until` decides: the time until which the last heartbeat is valid, by the
    same clock as `now`. An operation whose controller never sent a heartbeat does not count as
    abandoned.
    """
    if alive is not None:
        return not alive
    return alive_until is not None and alive_until < now


def attended(alive: bool | None, alive_until: float | None, now: float) -> bool | None:
    """Return whether an operation has a live controller, for display; None if unknown."""
    if alive is None and alive_until is None:
        return None
    return not abandoned(alive, alive_until, now)


def holds(beaten: Seconds, now: Seconds, ttl: Seconds = TTL) -> bool:
    """Return whether a controller may still act.

    `beaten`: when the controller sent the last heartbeat that arrived. `beaten` and `now` are times
    of the controller's clock, which includes time during which its machine is suspended. A
    heartbeat is written after it is sent, so other controllers wait longer than this.
    """
    return now - beaten <= ttl - MARGIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """A lease as known to its holder. A holder whose token is not the latest is refused."""

    resource: str
    token: int
    """Increases whenever the lease changes its holder, and never decreases."""
    operation: str
    """The job that holds the lease."""


_GUEST = "guest/"


def guest_resource(uuid: str) -> str:
    """Return the name of the lease on a guest."""
    return _GUEST + uuid


def host_resource(name: str) -> str:
    """Return the name of the lease on a host, which an evacuation holds."""
    return f"host/{name}"


def guest_of(resource: str) -> str | None:
    """Return the UUID of a lease's guest; None if the lease is not on a guest."""
    return resource.removeprefix(_GUEST) if resource.startswith(_GUEST) else None
